"""Keys of templates from the heads that messages carry, and back."""

from collections import OrderedDict
from functools import lru_cache

from instgenie.cluster.orders import template_id
from instgenie.cluster.wire import TemplateHead
from instgenie.engine.pricing import NO_MASK, NO_PICTURE
from instgenie.engine.register import name_key
from instgenie.jobs.activations import CacheDtype, Key, Kind
from instgenie.models.model import Model
from instgenie.types import Edit

KIND: Kind = "kv"
MAX_KEYS = 1024  # remembered
MAX_IDS = 2**16  # remembered


class Keys:
    def __init__(self, model: Model, cache_dtype: CacheDtype, stride: int = 1, keeps_text: bool = False) -> None:
        self.model, self.cache_dtype, self.stride, self.keeps_text = model, cache_dtype, stride, keeps_text
        self._find = lru_cache(MAX_KEYS)(self.make)
        self._ids: OrderedDict[Key, str] = OrderedDict()  # as messages name the templates

    def find(self, head: TemplateHead) -> Key:
        """The key of a template that a message names. Its id is remembered."""
        key = self._find(head)
        self._remember(key, head.id)
        return key

    def make(self, head: TemplateHead) -> Key:
        edit = Edit(NO_PICTURE, NO_MASK, "", steps=head.steps, guidance=head.guidance, size=head.size)
        named = head.picture, head.model, edit, self.model, KIND, self.cache_dtype, head.tenant
        return name_key(*named, self.stride, self.keeps_text)

    def head(self, key: Key) -> TemplateHead:
        """Describe a template by its key. A guidance that does not enter the network is the model's own, as it is in
        the heads that the cluster makes."""
        guidance = key.guidance if self.model.embeds_guidance else float(self.model.guidance)
        id = template_id(key.tenant, key.num_steps, guidance, key.picture)
        if key not in self._ids:
            self._remember(key, id)
        return TemplateHead(id, key.picture, key.tenant, key.model, key.size, key.num_steps, guidance)

    def _remember(self, key: Key, id: str) -> None:
        self._ids[key] = id
        self._ids.move_to_end(key)
        if len(self._ids) > MAX_IDS:
            self._ids.popitem(last=False)

    def known(self) -> list[Key]:
        """The keys whose ids are remembered."""
        return list(self._ids)

    def id(self, key: Key) -> str:
        """The id under which the cluster knows a template. It cannot always be derived from the key: some schedules
        have another number of steps than was asked for."""
        return self._ids.get(key) or self.head(key).id

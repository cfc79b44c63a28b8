"""Names of templates: which one an edit uses, and how workers address it. They are derived from pictures and from the
facts of the model. Knows no registration."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from instgenie.adapters.controlnets import ControlShape
from instgenie.adapters.layers import LayerTable
from instgenie.cluster.config import LoraConfig
from instgenie.cluster.entries import EditEntry
from instgenie.cluster.orders import Order, TemplateOrder
from instgenie.cluster.processes import Worker
from instgenie.cluster.wire import ModelFacts, TemplateHead
from instgenie.cost.table import Guided
from instgenie.pictures.digest import masked_share, picture_digest
from instgenie.pictures.resizing import working_size
from instgenie.scheduling.router import Work
from instgenie.types import Pixels

working_size_of = lru_cache(working_size)


class Naming:
    def __init__(self, workers: Sequence[Worker], loras: LoraConfig | None = None) -> None:
        self.workers = workers
        self.loras = LoraConfig() if loras is None else loras
        self.model_facts: ModelFacts | None = None  # None until the first process is ready
        self.control_shape: ControlShape | None = None  # of ControlNets that fit; None until a worker has told it
        self.layer_table: LayerTable | None = None  # layers that LoRAs may patch; None until a worker has told them

    def template_order(self, tenant: str, picture: Pixels, steps: int | None, guidance: float | None) -> TemplateOrder:
        """Complete an order: parameters that are None, or that make no difference to the model, get its defaults."""
        facts = self.model_facts
        assert facts is not None
        height, width, _ = picture.shape
        steps = facts.steps if steps is None else steps
        guidance = facts.guidance if guidance is None or not facts.embeds_guidance else guidance
        return TemplateOrder(tenant, (height, width), steps, float(guidance), picture_digest(picture), picture)

    def template_order_of(self, order: Order) -> TemplateOrder:
        """The template that an edit could use."""
        made = self.template_order(order.tenant, order.picture, order.wish.steps, order.wish.guidance)
        return replace(made, request_id=order.request_id)

    def head(self, entry: EditEntry) -> TemplateHead | None:
        """Address the template that an edit uses, if it uses one."""
        if entry.template is None:
            return None
        return self.head_of(entry.template, self.template_order_of(entry.order), self.workers[entry.worker])

    def head_of(self, template: str, order: TemplateOrder, worker: Worker) -> TemplateHead | None:
        """Address a template on a worker; None until the worker's model is known."""
        facts = self.model_facts
        if facts is None or worker.identity is None:
            return None
        size = working_size_of(*order.size, facts.size_multiple, facts.own_size)
        return TemplateHead(template, order.digest, order.tenant, worker.identity, size, order.steps, order.guidance)

    def works_of(self, orders: Sequence[Order]) -> list[Work]:
        """The work of each edit of a request."""
        facts = self.model_facts
        if facts is None:  # no worker has ever been ready, so that any estimate will do
            return [Work(order.wish.steps or 1, 1, 1) for order in orders]
        works = []
        for order in orders:
            height, width = working_size_of(*order.picture.shape[:2], facts.size_multiple, facts.own_size)
            num_tokens = (height // facts.patch) * (width // facts.patch)
            num_masked = max(round(num_tokens * masked_share(order.mask)), 1)
            num_steps = facts.steps if order.wish.steps is None else order.wish.steps
            template = self.template_order_of(order).id if order.can_reuse else None
            loras, controls = order.wish.loras, order.wish.controls
            works.append(
                Work(
                    num_steps,
                    num_tokens,
                    num_masked,
                    template,
                    own_share=order.own_share(num_steps),
                    loras=tuple((use.version, use.num_bytes) for use in loras),
                    num_free_steps=self.loras.num_free_steps(num_steps) if loras else 0,
                    controls=tuple((use.version, use.num_bytes) for use in controls),
                    guided=tuple(Guided(use.version, use.share(num_steps)) for use in controls),
                )
            )
        return works

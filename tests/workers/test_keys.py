"""Keys of templates, and the ids that clients know them by."""

from dataclasses import replace

import pytest
from diffusers import EulerDiscreteScheduler
from helpers.workers import SIZE

from instgenie.cluster.orders import template_id
from instgenie.cluster.wire import TemplateHead
from instgenie.models.model import Model
from instgenie.workers.keys import Keys


@pytest.mark.parametrize("family", ["blend", "blend_guided", "sd"])
def test_a_head_is_made_again_from_its_key(models: dict[str, Model], family: str) -> None:
    """Also where guidance does not enter the network, and so not the key."""
    model = models[family]
    keys = Keys(model, "model")
    guidance = 2.0 if model.embeds_guidance else float(model.guidance)
    head = TemplateHead(template_id("me", 4, guidance, "digest"), "digest", "me", "weights", SIZE, 4, guidance)
    key = keys.find(head)
    assert (key.picture, key.tenant, key.model) == ("digest", "me", "weights")
    assert keys.head(key) == head
    assert keys.id(key) == head.id


def test_ids_differ_in_all_that_keys_differ_in() -> None:
    facts = {"tenant": "me", "steps": 4, "guidance": 2.0, "digest": "one"}
    others = [{"tenant": "you"}, {"steps": 5}, {"guidance": 2.5}, {"digest": "two"}]
    assert len({template_id(**facts | other) for other in [{}, *others]}) == 5  # type: ignore[arg-type]


def test_the_id_is_the_one_that_messages_use(models: dict[str, Model]) -> None:
    """This schedule has one step more than was asked for, so the id cannot be derived from the key."""
    scheduler = EulerDiscreteScheduler.from_config(models["sdxl"].scheduler.config, timestep_spacing="trailing")
    model = replace(models["sdxl"], scheduler=scheduler)
    keys, guidance = Keys(model, "model"), float(model.guidance)
    head = TemplateHead(template_id("me", 61, guidance, "digest"), "digest", "me", "weights", SIZE, 61, guidance)
    key = keys.find(head)
    assert key.num_steps == 62
    assert keys.id(key) == head.id

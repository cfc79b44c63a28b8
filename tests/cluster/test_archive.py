"""Templates that outlived a cluster: listed by a worker, used, forgotten, their pictures read."""

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers.fake_cluster import FACTS, FakeCluster, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.config import CacheConfig
from instgenie.cluster.entries import ComputeMode
from instgenie.errors import ClosedError


def test_other_weights_are_another_model() -> None:
    cluster = make_lasting()
    cluster.accept(make_order())
    cluster.coordinator.ready(cluster.process("prepare"), FACTS, "other text encoders")
    cluster.accept(make_order())
    cluster.coordinator.ready(cluster.process("denoise"), FACTS, "another transformer")
    cluster.accept(make_order())
    assert len({fetch.template.model for _, fetch in cluster.fetches}) == 3


def listed(cluster: FakeCluster, worker: int = 0, num_steps: int = 4, **fields: Any) -> str:
    """A worker lists a template of the usual order's picture. Returns the template's id."""
    order = cluster.naming.template_order_of(make_order(**fields))
    head = cluster.naming.head_of(order.id, order, cluster.workers[worker])
    assert head is not None
    listing = wire.Listing(head, order.size, num_steps, {"disk": 900})
    cluster.answer("denoise", worker, wire.Listed(head.model, (listing,)))
    return head.id


def test_a_list_is_asked_for_once_per_model() -> None:
    cluster = FakeCluster(cache=CacheConfig(disk="somewhere"), devices=("cpu", "cpu"))
    cluster.open(0)
    assert cluster.listings == [(0, wire.List(cluster.workers[0].identity or ""))]
    cluster.open(1)
    assert len(cluster.listings) == 1
    cluster.kill("denoise", 0)  # before it has answered
    cluster.revive(cluster.process("denoise", 1))
    listed(cluster, 1)
    cluster.revive(cluster.process("denoise", 0))
    assert [worker for worker, _ in cluster.listings] == [0, 1]


def test_a_listed_template_is_used_and_forgotten() -> None:
    cluster = make_lasting(devices=("cpu", "cpu"))
    name = listed(cluster)
    template = cluster.library.templates[name]
    status = template.status()
    assert (status.state, status.num_registered_steps, status.width, status.height) == ("ready", 4, 64, 64)
    assert status.tier_bytes == {"disk": 900}
    [ticket] = cluster.accept(make_order())
    assert (ticket._entry.template, ticket._entry.mode) == (name, ComputeMode.CACHED)
    cluster.coordinator.forget(template)
    for worker in (0, 1):
        [forget] = [message for message in cluster.take("denoise", worker) if isinstance(message, wire.Forget)]
        assert (forget.template.id, forget.template.tenant) == (name, "me")
    listed(cluster)
    assert name not in cluster.library.templates  # it is on its way out


def test_an_incomplete_listed_template_is_registered_by_the_next_edit() -> None:
    cluster = make_lasting()
    name = listed(cluster, num_steps=2)
    template = cluster.library.templates[name]
    assert (template.state, template.message) == ("failed", "its registration was interrupted: register it again")
    [ticket] = cluster.accept(make_order())
    assert ticket._entry.template is None
    cluster.run()
    cluster.prepare()
    cluster.register()
    assert template.state == "ready"


def test_the_picture_of_a_listed_template_is_read() -> None:
    async def play() -> None:
        cluster = make_lasting()
        template = cluster.library.templates[listed(cluster)]
        denoiser = cluster.process("denoise")
        found, again = cluster.archive.recall(template), cluster.archive.recall(template)
        [recall] = [message for message in cluster.take("denoise") if isinstance(message, wire.Recall)]
        assert recall.template.id == template.id
        pixels = make_order().picture
        cluster.coordinator.handle(denoiser, wire.Recalled(template.id, (64, 64)), wire.picture_frames(pixels))
        assert np.array_equal(await found, pixels)
        assert np.array_equal(await again, pixels)
        lost = cluster.archive.recall(template)
        cluster.kill("denoise")
        with pytest.raises(ClosedError, match="stopped"):
            await lost
        with pytest.raises(ClosedError, match="no worker"):
            cluster.archive.recall(template)

    asyncio.run(play())

"""Pictures of templates in the cluster's memory: bounded, the least recently used go first."""

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Run
from helpers.fake_cluster import FakeCluster, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.shelf import picture_bytes
from instgenie.types import Pixels

ONE = 64 * 64 * 3  # bytes of a picture


def make_cluster(num_pictures: int, **config: Any) -> FakeCluster:
    cluster = FakeCluster(picture_bytes=num_pictures * ONE, **config)
    cluster.open()
    return cluster


def edit(cluster: FakeCluster, *picture_seeds: int) -> None:
    """Edit pictures, which registers them."""
    for seed in picture_seeds:
        cluster.edit_and_register(make_order(picture_seed=seed))


def ask(cluster: FakeCluster, seed: int) -> None:
    cluster.coordinator.register(cluster.naming.template_order("me", picture(seed), None, None))
    cluster.prepare()
    cluster.register()


def picture(seed: int) -> Pixels:
    return make_order(picture_seed=seed).picture


def kept(cluster: FakeCluster) -> list[int]:
    """The pictures that are kept, by their seeds, in the order of the templates."""
    held = [template.order.picture for template in cluster.library.templates.values()]
    return [seed for one in held if one is not None for seed in range(50) if np.array_equal(one, picture(seed))]


def num_bytes(cluster: FakeCluster) -> int:
    return sum(picture_bytes(template) for template in cluster.library.templates.values())


def test_pictures_that_nobody_asked_for_are_bounded() -> None:
    cluster = make_cluster(4)
    edit(cluster, *range(44))
    assert num_bytes(cluster) == 4 * ONE
    assert kept(cluster) == [40, 41, 42, 43]
    states = [template.state for template in cluster.library.templates.values()]
    assert states == ["ready"] * 44  # their activations are still used


def test_the_least_recently_used_goes_first() -> None:
    cluster = make_cluster(3)
    edit(cluster, 0, 1, 2)
    first = next(iter(cluster.library.templates.values()))
    cluster.library.learn(first.id, cluster.naming.template_order("me", picture(0), None, None))
    edit(cluster, 3)
    assert sorted(kept(cluster)) == [0, 2, 3]


def test_an_edit_brings_the_picture_back() -> None:
    cluster = make_cluster(1)
    edit(cluster, 0, 1)
    assert kept(cluster) == [1]
    cluster.kill("denoise")  # all activations are lost, and with them the templates that nobody asked for
    cluster.revive(cluster.process("denoise"))
    assert not cluster.library.templates
    edit(cluster, 0)
    assert kept(cluster) == [0]


def test_templates_that_were_asked_for_keep_their_pictures() -> None:
    cluster = make_cluster(2)
    ask(cluster, 0)
    edit(cluster, *range(1, 10))
    assert kept(cluster) == [0, 8, 9]


def test_a_picture_that_a_lasting_tier_has_may_go() -> None:
    cluster = make_lasting(picture_bytes=2 * ONE)
    ask(cluster, 0)
    [template] = cluster.library.templates.values()
    cluster.kept(template.id, host=1000, disk=1000)
    for seed in (1, 2):
        ask(cluster, seed)
        cluster.kept(list(cluster.library.templates)[-1], host=1000, disk=1000)
    ask(cluster, 3)
    assert kept(cluster) == [1, 2, 3]
    cluster.take("denoise")
    cluster.kill("denoise")
    assert template.state == "ready"


def test_an_edit_that_names_a_template_reads_the_picture_back(run: Run) -> None:
    cluster = make_lasting(picture_bytes=ONE)
    for seed in range(3):
        ask(cluster, seed)
        cluster.kept(list(cluster.library.templates)[-1], host=1000, disk=1000)
    name, *_ = cluster.library.templates
    assert kept(cluster) == [1, 2]
    face = Cluster.__new__(Cluster)
    face._coordinator = cluster.coordinator

    async def recall() -> Pixels | None:
        asking = asyncio.create_task(face.picture("me", name))
        await asyncio.sleep(0)
        [recalled] = [message for message in cluster.take("denoise") if isinstance(message, wire.Recall)]
        cluster.answer("denoise", 0, wire.Recalled(recalled.template.id, (64, 64)), *wire.picture_frames(picture(0)))
        return await asking

    assert np.array_equal(run(recall()), picture(0))


def test_a_failed_registration_leaves_nothing_behind() -> None:
    cluster = make_cluster(100)
    for seed in range(10):
        cluster.accept(make_order(picture_seed=seed))
        cluster.run()
        [message] = cluster.take("prepare")
        cluster.answer("prepare", 0, wire.JobFailed(message.id, message.attempt, "out_of_memory", "too large"))
    assert not cluster.library.templates
    assert num_bytes(cluster) == 0


@pytest.mark.parametrize("is_evicted", [True, False])
def test_a_failed_template_that_was_asked_for_is_shown_without_its_picture(is_evicted: bool) -> None:
    cluster = make_cluster(100)
    if is_evicted:
        template = cluster.register_template()
        cluster.kept(template.id)
    else:
        template = cluster.ask_for_template()
        [message] = cluster.take("prepare")
        cluster.answer("prepare", 0, wire.JobFailed(message.id, message.attempt, "internal", "broken"))
    assert (template.state, num_bytes(cluster)) == ("failed", 0)
    assert cluster.register_template() is template  # it can be asked for again
    assert (template.state, num_bytes(cluster)) == ("ready", ONE)

"""Edits that leave the batch for others, in a cluster of real processes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.clusters import Run, are_equal, collect, edit, make_config, make_order, pictures, until

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Order
from instgenie.cluster.status import Observer


class Watcher(Observer):
    """Remembers who was preempted for whom."""

    def __init__(self) -> None:
        self.preempted_for: list[tuple[str, str]] = []

    def preempted(self, worker: int, job: str, by: str) -> None:
        self.preempted_for.append((job, by))


@pytest.fixture(scope="module")
def cluster(run: Run, folders: dict[str, Path]) -> Iterator[Cluster]:
    """One worker whose batch has room for one edit."""
    cluster = Cluster(make_config(folders["sd"], max_batch_size=1))
    run(cluster.start())
    run(until(lambda: cluster.ready))
    yield cluster
    run(cluster.stop(0))


def background() -> Order:
    return make_order(1, steps=40, reuse="own")


def urgent(seed: int = 2, steps: int = 2) -> Order:
    return replace(make_order(seed, steps=steps, reuse="own"), priority=-1)


def test_an_urgent_edit_overtakes_a_running_one_whose_picture_stays_the_same(run: Run, cluster: Cluster) -> None:
    watcher = Watcher()
    cluster.observe(watcher)

    async def play() -> None:
        quiet = await edit(cluster, background())
        [slow] = cluster.submit([background()])
        following = asyncio.create_task(collect([slow]))
        ids = []
        for seed in range(3):
            await until(lambda: any(job.step > 1 for worker in cluster.status().workers for job in worker.running))
            [quick] = cluster.submit([urgent(seed)])
            ids.append(quick.id)
            pictures(await collect([quick]))
            assert not following.done()
        assert watcher.preempted_for == [(slow.id, id) for id in ids]
        disturbed = await following
        assert are_equal(pictures(disturbed), pictures(quiet))
        assert disturbed[0].facts.num_preemptions == 3  # type: ignore[union-attr]

    run(play())


def test_a_death_while_an_edit_is_preempted_loses_nothing(run: Run, cluster: Cluster) -> None:
    watcher = Watcher()
    cluster.observe(watcher)

    async def play() -> None:
        quiet = await edit(cluster, background())
        quiet_urgent = await edit(cluster, urgent(9, 40))
        [slow] = cluster.submit([background()])
        await until(lambda: any(job.step > 1 for worker in cluster.status().workers for job in worker.running))
        [quick] = cluster.submit([urgent(9, 40)])
        collecting = asyncio.create_task(collect([slow, quick]))
        await until(lambda: (slow.id, quick.id) in watcher.preempted_for)
        [worker] = cluster.workers
        assert worker.denoiser.launched is not None
        worker.denoiser.launched.kill()
        ended = await collecting
        assert are_equal(pictures(ended), pictures([*quiet, *quiet_urgent]))
        assert {event.facts.num_attempts for event in ended} == {2}  # type: ignore[union-attr]

    run(play())

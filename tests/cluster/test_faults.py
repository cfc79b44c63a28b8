"""Two workers whose processes die, hang or are killed, and edits that come out all the same."""

import asyncio
import os
import random
import signal
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import (
    QUIRK,
    Run,
    are_equal,
    collect,
    edit,
    kill,
    make_config,
    make_order,
    pictures,
    pid_of,
    register,
    submit_all,
    until,
)

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import CacheConfig
from instgenie.cluster.orders import Event, Failed, Finished, Order

SIZES = ((40, 48), (48, 40), (64, 64), (32, 96), (90, 33))


@pytest.fixture(scope="module")
def cluster(
    run: Run, folders: dict[str, Path], environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two workers that share a disk tier, so that both find what either has registered."""
    cache = CacheConfig(disk=str(tmp_path_factory.mktemp("shared")))
    cluster = Cluster(make_config(folders["sd"], devices=("cpu", "cpu"), cache=cache))
    run(cluster.start())
    run(until(lambda: is_whole(cluster)))
    yield cluster
    run(cluster.stop(0))


def is_whole(cluster: Cluster) -> bool:
    return all(worker.is_ready for worker in cluster.workers)


def sized(size: tuple[int, int], seed: int, share: float) -> dict[str, Any]:
    height, width = size
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    mask = np.zeros(size, np.bool_)
    mask[: round(height * share**0.5), : round(width * share**0.5)] = True
    return {"picture": picture, "mask": mask}


def is_registered(index: int) -> bool:
    """The others have pictures of their own: a shared one might be registered by its first edit before the second."""
    return index % 20 < 4


def thirty(tenant: str) -> list[Order]:
    return [
        make_order(
            seed=index,
            tenant=tenant,
            steps=(3, 5, 8, 13)[index % 4],
            guidance=(1.0, 7.5)[index % 2],
            prompt=("a red cat", "a blue dog on grass")[index % 2],
            **sized(SIZES[index % 5], index % 20 if is_registered(index) else index, 0.1 + 0.08 * (index % 10)),
        )
        for index in range(30)
    ]


def test_thirty_edits_while_processes_are_killed_at_random(run: Run, cluster: Cluster) -> None:
    chance = random.Random(5)

    async def play(tenant: str, num_kills: int) -> list[Event]:
        orders = thirty(tenant)
        await register(cluster, tenant, *orders[:4])
        await until(lambda: all("disk" in status.tier_bytes for status in cluster.templates(tenant)))
        collecting = asyncio.create_task(collect(submit_all(cluster, orders)))
        for _ in range(num_kills):
            await asyncio.sleep(chance.random())
            alive = [
                (one.role, worker.index) for worker in cluster.status().workers for one in worker.processes if one.pid
            ]
            if alive:
                kill(cluster, *chance.choice(alive))
        events = await collecting
        await until(lambda: is_whole(cluster))
        return events

    undisturbed = run(play("undisturbed", 0))
    num_restarts = cluster.status().num_restarts
    disturbed = run(play("disturbed", 4))
    assert cluster.status().num_restarts > num_restarts
    assert are_equal(pictures(disturbed), pictures(undisturbed))
    hits = [[event.facts.cache_tier is not None for event in events] for events in (undisturbed, disturbed)]
    assert hits[0] == hits[1]
    assert set(hits[0]) == {True, False}
    assert max(event.facts.num_attempts for event in disturbed) > 1


def test_edits_leave_a_worker_that_dies_or_hangs_for_another(run: Run, cluster: Cluster) -> None:
    """One denoise process is killed; then the other is stopped, noticed by its silence, and replaced."""

    async def play(number: int) -> tuple[int, int, list[Event]]:
        await until(lambda: is_whole(cluster))
        collecting = asyncio.create_task(edit(cluster, *(make_order(seed, steps=60) for seed in range(3))))
        await until(lambda: any(worker.running for worker in cluster.status().workers))
        [busy] = [worker.index for worker in cluster.status().workers if worker.running]
        pid = pid_of(cluster, "denoise", busy)
        os.kill(pid, number)
        return busy, pid, await collecting

    for number in (signal.SIGKILL, signal.SIGSTOP):
        busy, pid, events = run(play(number))
        pictures(events)
        assert {event.facts.worker for event in events} == {1 - busy}
        assert all(event.facts.num_attempts == 2 for event in events)
        assert pid not in all_pids(cluster)


def all_pids(cluster: Cluster) -> Sequence[int | None]:
    return [process.pid for worker in cluster.status().workers for process in worker.processes]


def test_an_edit_that_kills_every_process_fails_alone(run: Run, cluster: Cluster) -> None:
    """The other edits of its batch run again, and are answered."""

    async def play() -> list[Event]:
        await until(lambda: is_whole(cluster))
        orders = [make_order(prompt="death of steps"), *(make_order(seed, steps=12) for seed in range(3))]
        return await collect([ticket for order in orders for ticket in cluster.submit([order])])

    num_restarts = cluster.status().num_restarts
    failed, *others = run(play())
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.message) == ("crashed", "3 processes died while they worked on it")
    pictures(others)
    assert cluster.status().num_restarts + 1 >= num_restarts + 3  # the last restart may not have begun


SLOW_DISK = """
    import time
    from instgenie.cache import disk

    write = disk.write_file
    disk.write_file = lambda *given: (time.sleep(2), write(*given))
"""


def test_a_stop_leaves_time_to_write(
    run: Run, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the timeout is left to the worker, which writes activations to disk."""
    (tmp_path / "slow_disk.py").write_text(textwrap.dedent(SLOW_DISK))
    monkeypatch.setenv(QUIRK, str(tmp_path / "slow_disk.py"))
    folder = tmp_path / "disk"

    async def play() -> None:
        cluster = Cluster(make_config(folders["sd"], batching="naive", cache=CacheConfig(disk=str(folder))))
        await cluster.start()
        await cluster.until_ready()
        await register(cluster, "me", make_order(steps=8))
        assert await cluster.stop(60)

    run(play())
    assert len(list(folder.glob("*/0*.safetensors"))) == 2


def test_a_cluster_with_a_broken_clock(run: Run, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout depends on the time of day."""
    moments = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr("time.time", lambda: float(1e9 * (next(moments) % 2)))
    [event] = run(edit(cluster, make_order()))
    assert isinstance(event, Finished)

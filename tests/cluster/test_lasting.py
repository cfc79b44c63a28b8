"""Templates on disk outlive workers and clusters; damaged ones count as missing."""

import os
import signal
from pathlib import Path
from typing import Any

from helpers.clusters import (
    TENANT,
    Run,
    are_equal,
    edit,
    kill,
    make_config,
    make_order,
    pictures,
    register,
    until,
)

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import CacheConfig
from instgenie.cluster.orders import Finished


async def open_cluster(folder: Path, cache: CacheConfig, **fields: Any) -> Cluster:
    cluster = Cluster(make_config(folder, cache=cache, **fields))
    await cluster.start()
    await until(lambda: all(worker.is_ready for worker in cluster.workers))
    return cluster


async def edit_one(cluster: Cluster, **fields: Any) -> Finished:
    [event] = await edit(cluster, make_order(7, picture_seed=90, steps=8, **fields))
    assert isinstance(event, Finished), event
    return event


def spans(cache: CacheConfig) -> list[Path]:
    assert cache.disk
    return sorted(Path(cache.disk).glob("*/0*.safetensors"))


def test_templates_outlive_workers_and_clusters(
    run: Run, folders: dict[str, Path], environment: None, tmp_path: Path
) -> None:
    cache = CacheConfig(disk=str(tmp_path / "disk"))
    order = make_order(picture_seed=90, steps=8)

    async def leave_behind() -> Finished:
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        await register(cluster, TENANT, order)
        await until(lambda: len(spans(cache)) == 2)  # of four steps each: all steps are written
        finished = await edit_one(cluster)
        assert await cluster.stop(60)
        return finished

    async def find(expected: Finished) -> None:
        two = {"devices": ("cpu", "cpu"), "policy": "round_robin", "batching": "static"}
        cluster = await open_cluster(folders["sd"], cache, **two)
        others = [await edit_one(cluster, tenant="another"), await edit_one(cluster, quality="exact")]
        assert [other.facts.cache_tier for other in others] == [None, None]
        found = [await edit_one(cluster) for _ in range(4)]
        assert sorted(event.facts.cache_tier or "" for event in found) == ["disk", "disk", "host", "host"]
        assert {event.facts.worker for event in found} == {0, 1}
        assert are_equal(pictures(found), pictures([expected] * 4))
        [status] = cluster.templates(TENANT)
        assert status.state == "ready"
        await until(lambda: cluster.templates(TENANT)[0].tier_bytes.keys() == {"host", "disk"})
        assert cluster.status().cache_hits == {"disk": 2, "host": 2}
        assert all(worker.num_interruptions == 0 for worker in cluster.status().workers)
        await lose_all_but_the_disk(cluster, expected, status.id)
        assert await cluster.stop(60)

    async def lose_all_but_the_disk(cluster: Cluster, expected: Finished, template: str) -> None:
        for worker in cluster.status().workers:
            assert worker.pid
            os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not any(worker.is_ready for worker in cluster.workers))
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        again = await edit_one(cluster)
        assert again.facts.cache_tier == "disk"
        assert are_equal(pictures([again]), pictures([expected]))
        assert await cluster.forget(TENANT, template)
        await until(lambda: not any(path.exists() for path in mine))
        assert (await edit_one(cluster)).facts.cache_tier is None

    expected = run(leave_behind())
    assert expected.facts.cache_tier == "host"
    assert {path.stat().st_mode & 0o777 for path in spans(cache)} == {0o600}
    mine = spans(cache)
    assert len(mine) == 2
    run(find(expected))


def test_damaged_activations_are_registered_again(
    run: Run, folders: dict[str, Path], environment: None, tmp_path: Path
) -> None:
    """The cluster lists the template, so edits must use it: its worker registers the damaged part again first."""
    cache = CacheConfig(disk=str(tmp_path / "disk"))
    order = make_order(picture_seed=90, steps=8)

    async def play() -> None:
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        dense = await edit_one(cluster)
        await until(lambda: [status.tier_bytes.get("disk") for status in cluster.templates(TENANT)])
        await until(lambda: len(spans(cache)) == 2)
        cached = await edit_one(cluster)
        await cluster.stop(60)
        damage(spans(cache)[1])
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        await until(lambda: cluster.templates(TENANT))  # listed by the headers of its files
        first = await edit_one(cluster)
        assert (dense.facts.cache_tier, cached.facts.cache_tier) == (None, "host")
        assert first.facts.cache_tier is not None
        assert are_equal(pictures([first]), pictures([cached]))
        await until(lambda: "disk" in cluster.templates(TENANT)[0].tier_bytes)
        await register(cluster, TENANT, order)
        damage(spans(cache)[0])
        kill(cluster, "denoise")
        await until(lambda: not cluster.ready)
        again = await edit_one(cluster)
        assert again.facts.cache_tier is not None
        assert are_equal(pictures([again]), pictures([cached]))
        await cluster.stop(60)

    run(play())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 255
    path.write_bytes(data)

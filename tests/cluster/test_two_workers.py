"""Two real workers and an object store: a template that one of them registers is never computed by the other, which
copies it from memory, or, once the first is killed, from the store. The pictures are the same to the last bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.clusters import TENANT, Run, edit, kill, make_config, make_order, pictures, register, until
from helpers.s3 import URL, Server

from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import CacheConfig
from instgenie.cluster.library import Library
from instgenie.cluster.orders import Finished
from instgenie.cluster.processes import Process


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a real S3-compatible server."""
    server = Server()
    for name, value in server.options.items():
        monkeypatch.setenv(f"FSSPEC_S3_{name.upper()}", value)
    yield URL
    server.kill()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The workers that have computed a template, in the order they did."""
    workers: list[int] = []
    on_registered = Library.on_registered

    def note(self: Library, process: Process, message: wire.Registered, frames: list[wire.Frame]) -> None:
        if message.num_registered_steps == message.num_steps:
            workers.append(process.worker)
        on_registered(self, process, message, frames)

    monkeypatch.setattr(Library, "on_registered", note)
    return workers


async def edit_one(cluster: Cluster, picture_seed: int) -> Finished:
    [event] = await edit(cluster, make_order(7, picture_seed=picture_seed))
    assert isinstance(event, Finished), event
    return event


def are_same(*events: Finished) -> bool:
    first, *others = pictures(events)
    return all(np.array_equal(first, other) for other in others)


def test_a_worker_uses_what_another_has_registered(
    run: Run, folders: dict[str, Path], environment: None, registered: list[int], store: str
) -> None:
    async def play() -> None:
        two = {"devices": ("cpu", "cpu"), "batching": "static", "cache": CacheConfig(remote=store)}
        cluster = Cluster(make_config(folders["sd"], **two))
        router = cluster._coordinator.placement.router
        await cluster.start()
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        await copy_from_memory(cluster)
        router.policy = "mask_aware"
        await copy_from_the_store(cluster)
        assert await cluster.stop(60)

    async def copy_from_memory(cluster: Cluster) -> None:
        [template] = await register(cluster, TENANT, make_order(picture_seed=90))
        [holder] = registered
        first = await edit_one(cluster, 90)
        assert (first.facts.worker, first.facts.cache_tier) == (holder, "host")
        cluster._coordinator.placement.router.policy = "round_robin"
        others = [await edit_one(cluster, 90) for _ in range(4)]
        found = [(one.facts.worker == holder, one.facts.cache_tier) for one in others]
        assert sorted(found, key=str) == [(False, "host"), (False, "peer"), (True, "host"), (True, "host")]
        assert are_same(first, *others)
        assert cluster.status().cache_hits == {"host": 4, "peer": 1}
        await until(lambda: len(cluster._coordinator.library.holders(template)) == 2)
        assert registered == [holder]

    async def copy_from_the_store(cluster: Cluster) -> None:
        [template] = await register(cluster, TENANT, make_order(picture_seed=91))
        _, holder = registered
        first = await edit_one(cluster, 91)
        assert (first.facts.worker, first.facts.cache_tier) == (holder, "host")
        await until(lambda: "remote" in cluster._coordinator.library.templates[template].shared)
        kill(cluster, "denoise", holder)
        await until(lambda: not cluster.workers[holder].is_ready)
        again, copied = await edit_one(cluster, 91), await edit_one(cluster, 90)
        assert (again.facts.worker, again.facts.cache_tier) == (1 - holder, "remote")
        assert (copied.facts.worker, copied.facts.cache_tier) == (1 - holder, "host")
        assert are_same(first, again)
        assert len(registered) == 2

    run(play())

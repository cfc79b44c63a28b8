"""Two real workers and an object store: a template that one of them registers is never computed by the other, which
copies it from memory, or, once the first is killed, from the store. The pictures are the same to the last bit."""

from pathlib import Path

import pytest
from helpers.clusters import Run, kill, make_config, until
from helpers.sharing import copy_from_memory, copy_from_store, hold_in_store, note_registrations, s3_store

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import CacheConfig


def test_a_worker_uses_what_another_has_registered(
    run: Run, folders: dict[str, Path], environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = note_registrations(monkeypatch)

    async def play(store: str) -> None:
        two = {"devices": ("cpu", "cpu"), "batching": "static", "cache": CacheConfig(remote=store)}
        cluster = Cluster(make_config(folders["sd"], **two))
        await cluster.start()
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        await copy_from_memory(cluster, registered)
        assert cluster.status().cache_hits == {"host": 4, "peer": 1}
        holder, first = await hold_in_store(cluster, registered)
        kill(cluster, "denoise", holder)
        await until(lambda: not cluster.workers[holder].is_ready)
        await copy_from_store(cluster, holder, first)
        assert len(registered) == 2
        assert await cluster.stop(60)

    with s3_store(monkeypatch) as store:
        run(play(store))

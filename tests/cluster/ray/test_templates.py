"""Templates across the nodes of a real Ray cluster: from the memory of another node, and, once that node is killed,
from an object store."""

from pathlib import Path

import pytest
from helpers.clusters import Run, make_config, until
from helpers.rays import RayFront, RayNodes, make_settings
from helpers.sharing import copy_from_memory, copy_from_store, hold_in_store, note_registrations, s3_store

from instgenie.cluster.config import CacheConfig
from instgenie.scheduling.autoscaler import ScalingConfig

SCALING = ScalingConfig(min_workers=2, max_workers=2)


def test_a_node_uses_what_another_has_registered(
    rays: RayNodes, folders: dict[str, Path], run: Run, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = note_registrations(monkeypatch)

    async def play(front: RayFront) -> None:
        cluster = front.cluster
        await front.start()
        await until(lambda: front.num_ready == 2)
        assert front.node_of(0) != front.node_of(1)
        assert all(worker.denoiser.peer_address.startswith("tcp://") for worker in cluster.workers)
        await copy_from_memory(cluster, registered)
        holder, first = await hold_in_store(cluster, registered)
        rays.kill(rays.find(front.node_of(holder)))
        await until(lambda: front.num_ready == 1)
        await copy_from_store(cluster, holder, first)
        assert len(registered) == 2
        rays.add()
        await front.stop()

    with s3_store(monkeypatch) as store:
        two = {"devices": ("cpu", "cpu"), "batching": "naive", "cache": CacheConfig(remote=store)}
        run(play(RayFront(make_config(folders["sd"], **two), make_settings("templates", SCALING, rays.address))))

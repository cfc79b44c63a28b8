"""The configuration of a cluster: given, resolved, and the same for all its parts."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from instgenie.cluster import launch
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import UNTOLD_HOST_BYTES, CacheConfig, ClusterConfig, ProcessConfig, process_config
from instgenie.machine import memory
from instgenie.machine.memory import available_memory
from instgenie.server.monitoring.pulse import Pulse
from instgenie.server.serve import describe_cache
from instgenie.workers.templates import open_store

GIB = 2**30
CPU = torch.device("cpu")


def make_cluster(num_workers: int = 1, **cache: int) -> Cluster:
    return Cluster(ClusterConfig(devices=("cpu",) * num_workers, cache=CacheConfig(**cache)))


@pytest.fixture
def twelve_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "available_memory", lambda: 12.0 * GIB)


@pytest.mark.usefixtures("twelve_gib")
@pytest.mark.parametrize(("num_workers", "expected"), [(1, 6 * GIB), (3, 2 * GIB)])
def test_workers_share_half_of_the_memory(num_workers: int, expected: int) -> None:
    """The processes, the store, the pages and the printed start all have the same number."""
    cluster = make_cluster(num_workers)
    config = process_config(cluster.config, "0.denoise.1", "cpu", "ipc://somewhere")
    assert msgspec.json.decode(msgspec.json.encode(config), type=ProcessConfig).cache == cluster.config.cache
    [tier] = open_store(cluster.config.cache, CPU).memory
    assert (cluster.config.cache.host_bytes, tier.max_bytes) == (expected, expected)
    assert Pulse(cluster, "tiny").snapshot(0)["cache_bytes"] == 6 * GIB
    assert describe_cache(cluster.config.cache) == f"model, up to {expected // GIB} GiB in main memory per worker"


@pytest.mark.usefixtures("twelve_gib")
def test_a_number_wins() -> None:
    cluster = make_cluster(3, host_bytes=20 * GIB)
    assert cluster.config.cache.host_bytes == 20 * GIB
    assert Pulse(cluster, "tiny").snapshot(0)["cache_bytes"] == 60 * GIB


@pytest.mark.usefixtures("twelve_gib")
def test_zero_turns_the_tier_off() -> None:
    cluster = make_cluster(host_bytes=0)
    assert open_store(cluster.config.cache, CPU).memory == []
    assert Pulse(cluster, "tiny").snapshot(0)["cache_bytes"] == 0


def test_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "available_memory", lambda: math.inf)
    assert make_cluster(3).config.cache.host_bytes == UNTOLD_HOST_BYTES


@pytest.mark.skipif(math.isinf(available_memory()), reason="this system does not say")
def test_this_machine() -> None:
    """Memory comes and goes meanwhile."""
    before, chosen, after = available_memory(), make_cluster(2).config.cache.host_bytes, available_memory()
    assert 0.5 * min(before, after) < 4 * chosen < 2 * max(before, after)


def test_a_container_may_have_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    alone = memory.available_memory()
    for most, expected in (("3000000\n", 2_000_000.0), ("max\n", alone), ("1000\n", 0.0)):
        (tmp_path / "memory.max").write_text(most)
        (tmp_path / "memory.current").write_text("1500000\n")
        (tmp_path / "memory.stat").write_text("file 999\ninactive_file 300000\nactive_file 200000\n")
        assert memory.available_memory() == pytest.approx(expected, rel=0.1)


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        ClusterConfig().model = "other"  # type: ignore[misc]
    assert replace(ClusterConfig(), batching="naive").roles == ("denoise",)
    assert replace(ClusterConfig(), batching="static-pipelined").roles == ("prepare", "denoise", "finish")

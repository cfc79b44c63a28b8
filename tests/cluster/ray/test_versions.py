"""Versions of the package do not mix: a node of another version starts nothing, and says why."""

import asyncio

import msgspec
import pytest

from instgenie.cluster.config import ProcessConfig, ResolvedCache
from instgenie.cluster.ray.names import namespace
from instgenie.cluster.ray.node import NodeActor
from instgenie.machine import version
from instgenie.machine.version import package_version

CONFIG = ProcessConfig("a", "tcp://127.0.0.1:1", "", "cpu", "auto", 1, "continuous", ResolvedCache(host_bytes=0))


def test_a_node_of_another_version_refuses_a_front() -> None:
    async def play() -> None:
        node = NodeActor("secret", 1, {})
        await node.start("denoise", msgspec.json.encode(CONFIG), "0.0.1")

    with pytest.raises(OSError, match=rf"the node has InstGenIE {package_version()}, the front InstGenIE 0\.0\.1"):
        asyncio.run(play())


def test_clusters_of_two_versions_have_different_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = namespace("default")
    monkeypatch.setattr(version, "version", lambda _: "0.0.1")
    assert namespace("default") == "instgenie-default-0.0.1" != ours

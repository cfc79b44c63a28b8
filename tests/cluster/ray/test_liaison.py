"""A front and its controller: one that is away for a while changes nothing, one that is gone for good is told."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.ray.launcher import RayLauncher
from instgenie.cluster.ray.liaison import SECONDS_TO_HOPE, Liaison
from instgenie.cluster.ray.names import Directive


class PlayedController:
    """Answers, or raises."""

    error: RayError | None = None

    def __init__(self) -> None:
        self.report = SimpleNamespace(remote=self._report)

    async def _report(self, encoded: bytes) -> bytes:
        if self.error:
            raise self.error
        return msgspec.json.encode(Directive(True, ()))


@pytest.mark.parametrize(
    ("error", "is_gone"), [(ActorDiedError(), True), (ActorUnavailableError("restarting", None), False)]
)
def test_a_front_whose_controller_is_gone_for_good_is_unhealthy(error: Any, is_gone: bool) -> None:
    async def play() -> None:
        controller = PlayedController()
        launcher = RayLauncher(controller, "secret", "127.0.0.1", "namespace")
        cluster = Cluster(ClusterConfig(devices=("cpu",)), launcher)
        liaison = Liaison(launcher, cluster)
        await liaison._exchange()
        controller.error = error
        await liaison._exchange()
        assert cluster.healthy
        liaison._heard_at = time.monotonic() - SECONDS_TO_HOPE - 1
        await liaison._exchange()
        assert cluster.healthy != is_gone
        assert any("controller" in problem for problem in cluster.problems) == is_gone
        controller.error = None
        await liaison._exchange()
        assert cluster.healthy

    asyncio.run(play())

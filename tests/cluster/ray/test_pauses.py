"""Pauses of the controller's own process, which say nothing about fronts. It governs nothing here."""

import asyncio
from typing import Any

import msgspec
import pytest

from instgenie.cluster.ray import controller as module
from instgenie.cluster.ray.controller import SECONDS_BETWEEN_LOOKS, Controller
from instgenie.cluster.ray.names import ClusterSettings, FrontReport
from instgenie.scheduling.autoscaler import ScalingConfig

SETTINGS = ClusterSettings("tiny", {}, {"CPU": 1.0}, ScalingConfig(1, 1, 10.0, 60.0), front_timeout=30.0, linger=30.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def govern(clock: Clock, monkeypatch: pytest.MonkeyPatch, *pauses: float) -> tuple[int, bool]:
    """Let a front report once, and the controller look after each pause. Return how many fronts it knows in the end,
    and whether it has ended all workers."""
    ended: list[float] = []

    async def idle(*_: Any) -> None: ...

    async def end_all(self: Controller, timeout: float) -> None:
        ended.append(timeout)

    async def own_incarnation() -> str:
        return controller.id

    monkeypatch.setattr(module, "find_own_slots", dict)
    monkeypatch.setattr(module, "current_incarnation", own_incarnation)
    for name, method in {"_govern": idle, "_scale": idle, "_end_all": end_all}.items():
        monkeypatch.setattr(Controller, name, method)
    controller: Any = object.__new__(Controller)
    await Controller.__init__(controller, msgspec.json.encode(SETTINGS), "", {})
    await controller.report(msgspec.json.encode(FrontReport("front", "tcp://somewhere", 0.0, 0, ())))
    for pause in pauses:
        clock.now += pause
        await controller._look()
    return len(controller.fronts), bool(ended)


@pytest.mark.parametrize(
    ("pauses", "expected"),
    [
        ([SECONDS_BETWEEN_LOOKS] * 50, (1, False)),
        ([SECONDS_BETWEEN_LOOKS] * 70, (0, False)),  # the front is silent
        ([SECONDS_BETWEEN_LOOKS] * 140, (0, True)),  # and nobody comes
        ([500.0], (1, False)),  # the node of the controller was held up
        ([500.0, *[SECONDS_BETWEEN_LOOKS] * 50], (1, False)),
        ([*[SECONDS_BETWEEN_LOOKS] * 70, 500.0], (0, False)),
    ],
)
def test_a_pause_of_the_controller_is_not_the_silence_of_a_front(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, pauses: list[float], expected: tuple[int, bool]
) -> None:
    assert asyncio.run(govern(clock, monkeypatch, *pauses)) == expected

"""The controller while fronts come and go; Ray itself is played, so that each moment can be chosen."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from instgenie.cluster.ray import controller as controller_module
from instgenie.cluster.ray.controller import Controller
from instgenie.cluster.ray.names import ClusterSettings, Directive, FrontReport, NodeFacts
from instgenie.scheduling.autoscaler import ScalingConfig

SETTINGS = msgspec.json.encode(ClusterSettings("tiny", {}, {"CPU": 1.0}, ScalingConfig(3, 3), 30.0, 30.0))


class PlayedCall:
    def __init__(self, work: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.work = work

    def remote(self, *arguments: Any) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.work(*arguments))


class PlayedActor:
    """The actor of a slot; the first two slots are on one node."""

    def __init__(self, index: int) -> None:
        self.index, self.is_written, self.detached = index, asyncio.Event(), list[str]()
        self.facts, self.end, self.detach = PlayedCall(self._facts), PlayedCall(self._end), PlayedCall(self._detach)

    async def _facts(self) -> bytes:
        return msgspec.json.encode(NodeFacts(f"node {self.index // 2}", "127.0.0.1", 8.0, 2))

    async def _end(self, timeout: float) -> None:
        await self.is_written.wait()

    async def _detach(self, front: str) -> None:
        self.detached.append(front)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[int, PlayedActor]:
    """The slots that a controller finds when it starts."""
    slots: dict[int, PlayedActor] = {}
    patches: dict[str, Callable[..., Any]] = {
        "find_own_slots": lambda: dict(slots),
        "make_slot": lambda index, *_: PlayedActor(index),
        "remove_slot": lambda *_: None,
        "end_this_actor": lambda: None,
    }
    for name, played in patches.items():
        monkeypatch.setattr(controller_module, name, played)
    monkeypatch.setattr(controller_module, "SECONDS_BETWEEN_LOOKS", 0.01)
    return slots


async def start() -> Controller:
    controller = Controller.__new__(Controller)
    await controller.__init__(SETTINGS, "secret", {})  # type: ignore[misc]
    return controller


async def report(controller: Controller, front: str) -> Directive:
    told = await controller.report(msgspec.json.encode(FrontReport(front, f"tcp://{front}", 0.0, 0)))
    return msgspec.json.decode(told, type=Directive)


async def enter(controller: Controller, front: str) -> Directive:
    """Join, report, and wait until all slots have a node."""
    assert await controller.join(SETTINGS) == ([], "secret")
    async with asyncio.timeout(30):
        while not (slots := (await report(controller, front)).slots) or not all(slot.facts for slot in slots):
            await asyncio.sleep(0.01)
    return await report(controller, front)


def test_a_front_can_ask_for_the_number_of_workers(found: dict[int, PlayedActor]) -> None:
    async def play() -> int:
        return await (await start()).max_workers()

    assert asyncio.run(play()) == 3


def test_a_slot_knows_how_many_share_its_node(found: dict[int, PlayedActor]) -> None:
    async def play() -> Directive:
        return await enter(await start(), "a")

    assert [(slot.index, slot.num_neighbours) for slot in asyncio.run(play()).slots] == [(0, 2), (1, 2), (2, 1)]


def test_a_front_that_has_joined_finds_the_workers_when_the_last_other_leaves(found: dict[int, PlayedActor]) -> None:
    async def play() -> None:
        controller = await start()
        await enter(controller, "a")
        await controller.join(SETTINGS)
        await controller.leave("a", 1.0)
        assert len((await report(controller, "b")).slots) == 3
        await asyncio.sleep(0)
        assert [slot.actor.detached for slot in controller.slots.values()] == [["a"]] * 3
        for slot in controller.slots.values():
            slot.actor.is_written.set()
        await controller.leave("b", 1.0)
        assert controller.slots == {}

    asyncio.run(play())


def test_nobody_joins_a_cluster_that_ends(found: dict[int, PlayedActor]) -> None:
    async def play() -> None:
        controller = await start()
        await enter(controller, "a")
        leaving = asyncio.create_task(controller.leave("a", 60.0))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="about to end"):
            await controller.join(SETTINGS)
        for slot in controller.slots.values():
            slot.actor.is_written.set()
        await leaving
        assert controller.slots == {}

    asyncio.run(play())


def test_a_controller_that_was_restarted_waits_for_fronts_that_have_not_yet_reported(
    found: dict[int, PlayedActor],
) -> None:
    async def play() -> None:
        found.update({index: PlayedActor(index) for index in range(3)})
        controller = await start()
        await controller.leave("a", 1.0)
        assert len((await report(controller, "b")).slots) == 3

    asyncio.run(play())


@pytest.mark.parametrize("is_current", [True, False])
def test_workers_outlive_their_fronts_for_a_while(
    found: dict[int, PlayedActor], is_current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the front died; not if the controller slept for so long, or has a successor."""

    async def play() -> None:
        controller = await start()

        async def incarnation() -> str:
            return controller.id if is_current else "successor"

        monkeypatch.setattr(controller_module, "current_incarnation", incarnation)
        await enter(controller, "a")
        for slot in controller.slots.values():
            slot.actor.is_written.set()
        shift(controller, 1000.0, is_asleep=True)
        await asyncio.sleep(0.1)
        assert list(controller.fronts) == ["a"]
        assert len(controller.slots) == 3
        shift(controller, 1000.0)
        await asyncio.sleep(0.5)
        assert controller.fronts == {}
        assert len(controller.slots) == (0 if is_current else 3)

    asyncio.run(play())


def shift(controller: Controller, seconds: float, is_asleep: bool = False) -> None:
    """Let time pass, with or without the controller's notice."""
    controller.alone_since -= seconds
    controller.pauses.looked_at -= seconds if is_asleep else 0.0
    for front in controller.fronts.values():
        front.heard_at -= seconds

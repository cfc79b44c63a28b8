"""The controller of a cluster on Ray: one detached actor. It gives slots to nodes, knows the fronts, and decides how
many slots there are. It lies on no path of an edit: while it is away, fronts and workers go on.

It needs no memory of its own: settings and secret are the arguments that Ray starts it with again, slots are found by
their names, and fronts report twice a second. A controller whose node was cut off may wake up beside its successor: it
counts the time that it has missed against nobody, and ends nothing.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from instgenie.cluster.ray.names import LEDGER, ClusterSettings, Directive, FrontReport, NodeFacts, SlotInfo, SlotState
from instgenie.cluster.ray.slots import find_slots, make_slot, remove_slot
from instgenie.machine.binding import check_parent
from instgenie.machine.pauses import Pauses
from instgenie.scheduling.autoscaler import Autoscaler

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_WRITE = 600.0  # for the processes of a drained slot to write what is worth keeping
SECONDS_TO_ANSWER = 0.2  # the last call, before the controller ends
SECONDS_TO_CALL = 10.0  # itself
SECONDS_TO_REMEMBER = 5.0  # after a restart, for the fronts to report, before anything is scaled down

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerSlot:
    index: int
    actor: Any
    is_draining: bool = False
    num_drains: int = 0  # tells a front's word about this drain from one about an earlier
    is_ending: bool = False
    facts: NodeFacts | None = None
    asking: asyncio.Task[None] | None = field(default=None, repr=False)  # for its facts

    @property
    def state(self) -> SlotState:
        if self.is_ending:
            return "ending"
        if self.is_draining:
            return "draining"
        return "running" if self.facts else "waiting"


@dataclass(eq=False)
class KnownFront:
    report: FrontReport
    heard_at: float


class Controller:
    async def __init__(  # type: ignore[misc]  # Ray awaits it, in the loop of the actor
        self, settings: bytes, secret: str, environment: dict[str, str]
    ) -> None:
        self.settings = msgspec.json.decode(settings, type=ClusterSettings)
        self.secret = secret
        self.environment = environment
        self.autoscaler = Autoscaler(self.settings.scaling)
        self.fronts: dict[str, KnownFront] = {}
        self.id = uuid.uuid4().hex  # of this incarnation
        found = await asyncio.to_thread(find_own_slots)
        self.slots = {index: WorkerSlot(index, actor) for index, actor in found.items()}
        self.num_expected = 0  # fronts that have joined and not yet reported
        self.may_have_forgotten = bool(found)  # True if an earlier controller knew fronts which have yet to report
        self.is_ending = False
        self.alone_since = self.started_at = self.awake_since = time.monotonic()
        self.pauses = Pauses(4 * SECONDS_BETWEEN_LOOKS, self.started_at)
        self.parent = os.getppid()
        self._tasks = {asyncio.create_task(self._govern())}

    # fronts

    async def join(self, settings: bytes) -> tuple[list[str], str]:
        """What keeps a front with these settings from joining, and the cluster's secret. Raises while the cluster ends:
        a front that tries again makes the next one."""
        if self.is_ending:
            raise RuntimeError("the cluster is about to end")
        differences = self.settings.differences(msgspec.json.decode(settings, type=ClusterSettings))
        if not differences:
            self.num_expected += 1
            self.alone_since = time.monotonic()
        return differences, "" if differences else self.secret

    async def incarnation(self) -> str:
        return self.id

    async def max_workers(self) -> int:
        return self.settings.scaling.max_workers

    async def report(self, encoded: bytes) -> bytes:
        report = msgspec.json.decode(encoded, type=FrontReport)
        is_known = report.front in self.fronts or time.monotonic() - self.started_at < SECONDS_TO_REMEMBER
        if report.front not in self.fronts:
            self.num_expected = max(self.num_expected - 1, 0)
        self.fronts[report.front] = KnownFront(report, time.monotonic())
        return msgspec.json.encode(self._directive(is_known))

    async def leave(self, front: str, timeout: float) -> None:
        """Let a front go. The last one takes the workers with it; if others may be about to report, they have time
        for that."""
        self.fronts.pop(front, None)
        if self.fronts or self.num_expected or self.may_have_forgotten:
            self._detach(front)
        else:
            await self._end_all(timeout)

    async def state(self) -> bytes:
        """What a front would be told, for status reports."""
        return msgspec.json.encode(self._directive(is_known=True))

    def _directive(self, is_known: bool) -> Directive:
        num_slots = Counter(slot.facts.node for slot in self.slots.values() if slot.facts)
        infos = tuple(
            SlotInfo(
                slot.index,
                slot.state,
                slot.facts,
                num_slots[slot.facts.node] if slot.facts else 1,
                slot.num_drains,
            )
            for slot in sorted(self.slots.values(), key=lambda slot: slot.index)
        )
        return Directive(is_known, infos, tuple(front.report.endpoint for front in self.fronts.values()))

    # slots

    async def _govern(self) -> None:
        while True:
            check_parent(self.parent)  # without it the node is gone for Ray, which has started another controller
            try:
                await self._look()
            except Exception:
                log.exception("the controller could not look after its slots")
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _look(self) -> None:
        if self.is_ending:
            return
        now = time.monotonic()
        self._forgive(now)
        self.may_have_forgotten &= now - self.started_at < SECONDS_TO_REMEMBER
        self._drop_silent(now)
        for slot in self.slots.values():
            if slot.asking is None or slot.asking.done():
                slot.asking = asyncio.create_task(self._ask(slot))
        if not self.fronts:
            if now - self.alone_since > self.settings.linger and await current_incarnation() == self.id:
                await self._end_all(SECONDS_TO_WRITE)
            return
        self.alone_since = now
        await self._scale(now)
        self._end_drained()

    def _forgive(self, now: float) -> None:
        """Count the time in which this actor was held up, with its node or by a call, against no front."""
        if late := self.pauses.look(now):
            self.alone_since, self.awake_since = self.alone_since + late, now
            for front in self.fronts.values():
                front.heard_at += late

    def _drop_silent(self, now: float) -> None:
        for front in list(self.fronts.values()):
            if now - front.heard_at > self.settings.front_timeout:
                log.warning("front is gone", extra={"front": front.report.front})
                del self.fronts[front.report.front]
                self._detach(front.report.front)

    def _detach(self, front: str) -> None:
        for slot in self.slots.values():
            slot.actor.detach.remote(front)

    async def _ask(self, slot: WorkerSlot) -> None:
        """Learn where a slot is. A call to an actor that has no node yet waits until it has one."""
        try:
            slot.facts = msgspec.json.decode(await slot.actor.facts.remote(), type=NodeFacts)
            if slot.facts.is_ending:  # an earlier controller began it
                self._begin_to_end(slot)
        except RayError:
            slot.facts = None
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def _scale(self, now: float) -> None:
        reports = [front.report for front in self.fronts.values()]
        seconds, num_edits = sum(one.seconds for one in reports), sum(one.num_edits for one in reports)
        staying = [slot for slot in self.slots.values() if not (slot.is_draining or slot.is_ending)]
        wanted = self.autoscaler.decide(now, seconds, num_edits, len(staying))
        if wanted > len(staying):
            await self._grow(wanted - len(staying))
        elif wanted < len(staying) and now - self.awake_since > SECONDS_TO_REMEMBER:
            # those without a node first, then those that came last
            staying.sort(key=lambda slot: (slot.facts is None, slot.index))
            for slot in staying[wanted:]:
                log.info("slot drains", extra={"slot": slot.index})
                slot.is_draining, slot.num_drains = True, slot.num_drains + 1

    async def _grow(self, number: int) -> None:
        """Take back slots that drain, then make new ones."""
        for slot in [slot for slot in self.slots.values() if slot.is_draining and not slot.is_ending][:number]:
            slot.is_draining = False
            number -= 1
        free = [index for index in range(self.settings.scaling.max_workers) if index not in self.slots]
        for index in free[:number]:
            arguments = (index, self.settings.resources, self.secret, self.environment)
            self.slots[index] = WorkerSlot(index, await asyncio.to_thread(make_slot, *arguments))

    def _end_drained(self) -> None:
        """Give up the draining slots on which no front has anything."""
        for slot in self.slots.values():
            drain = (slot.index, slot.num_drains)
            if slot.is_draining and all(drain in front.report.released for front in self.fronts.values()):
                self._begin_to_end(slot)

    def _begin_to_end(self, slot: WorkerSlot) -> None:
        if not slot.is_ending:
            slot.is_ending = True
            task = asyncio.create_task(self._end(slot, SECONDS_TO_WRITE))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _end(self, slot: WorkerSlot, timeout: float) -> None:
        slot.is_ending = True
        if slot.facts:  # else it has no process, and a call would wait for a node
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(timeout + SECONDS_TO_ANSWER):
                    await slot.actor.end.remote(timeout)
        await asyncio.to_thread(remove_slot, slot.index, slot.actor)
        self.slots.pop(slot.index, None)

    async def _end_all(self, timeout: float) -> None:
        """End all workers, and then this actor."""
        self.is_ending = True
        await asyncio.gather(*(self._end(slot, timeout) for slot in list(self.slots.values())))
        asyncio.get_running_loop().call_later(SECONDS_TO_ANSWER, end_this_actor)


def find_own_slots() -> dict[int, Any]:
    """The slots of an earlier incarnation. Those of a controller that is gone for good have another secret, and end."""
    found = find_slots()
    if not found or ray.get_runtime_context().was_current_actor_reconstructed:
        return found
    for index, actor in found.items():
        remove_slot(index, actor)
    return {}


async def current_incarnation() -> str | None:
    """That of the controller which Ray knows now; None: it does not answer."""
    try:
        async with asyncio.timeout(SECONDS_TO_CALL):
            found: str = await ray.get_runtime_context().current_actor.incarnation.remote()
            return found
    except (RayError, TimeoutError):
        return None


def end_this_actor() -> None:
    with suppress(ValueError):  # no front has asked for it
        ray.kill(ray.get_actor(LEDGER), no_restart=True)
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

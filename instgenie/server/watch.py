"""Follows the edits of one request until each is finished or has failed, the deadline passes or the client
disconnects. However the watch ends, unfinished edits are cancelled. An edit that fails stops no other."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import Request

from instgenie.cluster.orders import Event, Failed, Finished
from instgenie.server.errors import ApiError, from_failure, gone, late
from instgenie.server.monitoring.log import say

Out = TypeVar("Out")


@dataclass(frozen=True)
class Deadline:
    start: float  # when the first byte of the request arrived, of `time.monotonic`
    milliseconds: int

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.start + self.milliseconds / 1000 - time.monotonic())

    def check(self) -> None:
        if not self.seconds_left:
            raise late(self.milliseconds)


async def in_time(deadline: Deadline | None, work: Awaitable[Out]) -> Out:
    """Return the result of `work`, or cancel it and raise 408 if the deadline passes first."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline.seconds_left):
            return await work
    except TimeoutError:
        raise late(deadline.milliseconds) from None


class EditTicket(Protocol):
    """An edit that can be followed."""

    @property
    def id(self) -> str: ...

    def cancel(self) -> None: ...

    def events(self) -> AsyncIterator[Event]: ...


class EditWatch:
    def __init__(self, tickets: Sequence[EditTicket], deadline: Deadline | None = None) -> None:
        self.tickets = tickets
        self.deadline = deadline
        self.open = set(range(len(tickets)))
        self.errors: dict[int, ApiError] = {}  # of the edits that failed, by index
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self.tickets))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for pump in self.pumps:
            pump.cancel()
        self.pumps.clear()  # a cancelled task refers back to this watch: the cycle would keep the pixels of the edits
        self._cancel()

    def _cancel(self) -> None:
        for index in self.open:
            self.tickets[index].cancel()
        self.open.clear()

    async def _pump(self, index: int) -> None:
        try:
            async for event in self.tickets[index].events():
                self.events.put_nowait((index, event))
        except Exception:
            say("the event stream of an edit failed", level=40)
            self.events.put_nowait((index, Failed("internal", "")))

    async def next(self, patience: float | None = None) -> tuple[int, Event] | None:
        """Return the next event and the index of its edit; None after `patience` quiet seconds, and when the deadline
        has passed."""
        left = self.deadline.seconds_left if self.deadline else None
        wait = min((limit for limit in (patience, left) if limit is not None), default=None)
        try:
            async with asyncio.timeout(wait):
                index, event = await self.events.get()
        except TimeoutError:
            self._check_deadline()
            return None
        if isinstance(event, Finished):
            self.open.discard(index)
        if isinstance(event, Failed):
            self.open.discard(index)
            self.errors[index] = from_failure(event)
            say("an edit failed", level=30, kind=event.kind, reason=event.message)
        return index, event

    def _check_deadline(self) -> None:
        if self.deadline and not self.deadline.seconds_left:
            self.errors |= {index: late(self.deadline.milliseconds) for index in self.open}
            self._cancel()

    async def all(self) -> dict[int, Finished]:
        """Return the results by the index of their edits. Raise if there is none."""
        found: dict[int, Finished] = {}
        while self.open:
            match await self.next():
                case (index, Finished() as finished):
                    found[index] = finished
        if not found:
            raise self.errors[min(self.errors)]
        return found


async def unless_gone(request: Request, work: Coroutine[Any, Any, Out]) -> Out:
    """Return the result of `work`, or cancel it and raise 499 if the client disconnects first. Requires that the
    request's body has been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(request))
    try:
        done, _ = await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working not in done:
            raise gone()
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

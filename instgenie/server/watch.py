"""Follows the edits of one request until all are finished, one fails, the deadline passes or the client disconnects.
However the watch ends, unfinished edits are cancelled."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from starlette.requests import Request

from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Event, Failed, Finished
from instgenie.server.errors import from_failure, gone, late
from instgenie.server.monitoring.log import say

Out = TypeVar("Out")


class EditWatch:
    def __init__(self, tickets: Sequence[Ticket], deadline_ms: int | None) -> None:
        self.tickets = tickets
        self.deadline_ms = deadline_ms
        self.open = set(range(len(tickets)))
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.pumps: list[asyncio.Task[None]] = []
        self.start = time.monotonic()

    async def __aenter__(self) -> Self:
        self.pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self.tickets))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for pump in self.pumps:
            pump.cancel()
        for index in self.open:
            self.tickets[index].cancel()

    async def _pump(self, index: int) -> None:
        try:
            async for event in self.tickets[index].events():
                self.events.put_nowait((index, event))
        except Exception:
            say("the event stream of an edit failed", level=40)
            self.events.put_nowait((index, Failed("internal", "")))

    async def next(self, patience: float | None = None) -> tuple[int, Event] | None:
        """Return the next event and the index of its edit; None after `patience` quiet seconds. Raise on failure."""
        wait = min((limit for limit in (patience, self._left()) if limit is not None), default=None)
        try:
            async with asyncio.timeout(wait):
                index, event = await self.events.get()
        except TimeoutError:
            if self._left() == 0:
                assert self.deadline_ms is not None
                raise late(self.deadline_ms) from None
            return None
        if isinstance(event, Finished):
            self.open.discard(index)
        if isinstance(event, Failed):
            self.open.discard(index)
            say("an edit failed", level=30, kind=event.kind, reason=event.message)
            raise from_failure(event)
        return index, event

    def _left(self) -> float | None:
        if self.deadline_ms is None:
            return None
        return max(0.0, self.start + self.deadline_ms / 1000 - time.monotonic())

    async def all(self) -> list[Finished]:
        """Return the results, in the order of the edits."""
        found: dict[int, Finished] = {}
        while self.open:
            happened = await self.next()
            if happened and isinstance(happened[1], Finished):
                found[happened[0]] = happened[1]
        return [found[index] for index in sorted(found)]


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

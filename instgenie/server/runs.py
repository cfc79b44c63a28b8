"""The edits of a request with an idempotency key, for all requests that share the key. They run to their end whether or
not anybody waits, and their results are kept for those who ask later. Knows tickets and events; knows no key."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Event, Facts, Failed, Finished, Partial
from instgenie.cluster.wire import Frame
from instgenie.server.bodies.answers import EventPrefix
from instgenie.server.bodies.fields import ImageFields
from instgenie.types import Box, Notes

SHOWN = ("prompt", "quality", "output_format", "response_format")  # fields that an answer shows


class RunTicket:
    """One edit, for any number of requests. None of them cancels it."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.last: Finished | Failed | None = None
        self.is_ended = False
        self._latest: Event | None = None  # progress
        self._partials: list[Partial] = []
        self._listeners: list[asyncio.Queue[Event | None]] = []

    def tell(self, event: Event | None) -> None:
        """Pass on an event; None is the end."""
        match event:
            case None:
                self.is_ended = True
                self._partials.clear()
                self._latest = None
            case Finished() | Failed():
                self.last = event
            case Partial():
                self._partials.append(event)
            case _:
                self._latest = event
        for listener in self._listeners:
            listener.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        """Yield what is still of interest of the past, then what happens."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        for event in (*self._partials, self._latest, self.last):
            if event is not None:
                queue.put_nowait(event)
        if self.is_ended:
            queue.put_nowait(None)
        self._listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.remove(queue)

    def cancel(self) -> None:
        """Nothing: another request may wait for the edit, or come for it later."""


@dataclass(frozen=True, eq=False)
class DepositedRequest:
    """A request, so that another front can go on with it."""

    kind: str  # name of the class of its fields
    fields: dict[str, Any]
    image: bytes | None
    mask: bytes | None
    references: tuple[bytes, ...] = ()

    def frames(self) -> list[Frame]:
        pictures = [self.image, self.mask, *self.references]
        head = {"kind": self.kind, "fields": self.fields, "has": [picture is not None for picture in pictures]}
        return [msgspec.json.encode(head), *(picture or b"" for picture in pictures)]


def read_request(frames: Sequence[Frame]) -> DepositedRequest:
    head = msgspec.json.decode(frames[0])
    pictures = [bytes(frame) if is_there else None for frame, is_there in zip(frames[1:], head["has"], strict=True)]
    image, mask, *references = pictures
    return DepositedRequest(head["kind"], head["fields"], image, mask, tuple(filter(None, references)))


@dataclass(eq=False)
class EditRun:
    """The edits of the first request with a key."""

    name: str
    fingerprint: str
    request_name: str  # by which the first request is found
    home: int | None = None  # the worker that may have begun
    request: DepositedRequest | None = None  # until it is submitted, where other fronts may have to go on with it
    is_opened: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    tickets: list[RunTicket] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (height, width) of the pictures
    fields: ImageFields = field(default_factory=lambda: ImageFields.model_validate({"prompt": ""}))
    notes: Notes = field(default_factory=list)
    prefix: EventPrefix = "image_edit"
    until: float = 0.0  # when it is forgotten, once it has ended
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        return bool(self.tickets) and all(ticket.is_ended for ticket in self.tickets)

    @property
    def results(self) -> dict[int, Finished]:
        found = ((index, ticket.last) for index, ticket in enumerate(self.tickets))
        return {index: last for index, last in found if isinstance(last, Finished)}

    @property
    def is_whole(self) -> bool:
        """True if every picture was made."""
        return self.is_ended and len(self.results) == len(self.tickets)

    @property
    def num_bytes(self) -> int:
        return sum(len(one.picture) for one in self.results.values())

    @property
    def seed(self) -> int:
        """The seed of a request that leaves it open: the same for all fronts."""
        return int(self.name[:7], 16)

    def open(self, tickets: Sequence[Ticket], sizes: Sequence[tuple[int, int]]) -> None:
        """Begin to follow the edits."""
        self.tickets = [RunTicket(ticket.id) for ticket in tickets]
        self.sizes = list(sizes)
        self.is_opened.set_result(True)

    async def follow(self, index: int, ticket: Ticket) -> None:
        async for event in ticket.events():
            self.tickets[index].tell(event)
        self.tickets[index].tell(None)

    def restore(self, frames: Sequence[Frame]) -> None:
        """Take over the answer that another front has deposited."""
        head = msgspec.json.decode(frames[0])
        self.notes, self.prefix = head["notes"], head["prefix"]
        self.fields = ImageFields.model_validate(head["fields"])
        self.tickets = []
        for name, facts, frame in zip(head["ids"], head["facts"], frames[1:], strict=True):
            ticket = RunTicket(name)
            ticket.tell(Finished(bytes(frame), read_facts(facts)))
            ticket.tell(None)
            self.tickets.append(ticket)
        self.sizes = [(one.facts.height, one.facts.width) for one in self.results.values()]
        self.is_opened.set_result(True)

    def frames(self) -> list[Frame]:
        """The whole answer, as it is deposited for other fronts."""
        results = self.results.values()
        head = {
            "notes": self.notes,
            "prefix": self.prefix,
            "fields": {name: getattr(self.fields, name) for name in SHOWN},
            "ids": [ticket.id for ticket in self.tickets],
            "facts": [plain_facts(one.facts) for one in results],
        }
        return [msgspec.json.encode(head), *(one.picture for one in results)]


def plain_facts(facts: Facts) -> dict[str, Any]:
    plain = {one.name: getattr(facts, one.name) for one in fields(Facts)}
    if box := facts.crop:
        plain["crop"] = (box.rows.start, box.rows.stop, box.cols.start, box.cols.stop)
    return plain


def read_facts(plain: dict[str, Any]) -> Facts:
    facts = Facts(**plain | {"crop": None})
    if plain["crop"] is None:
        return facts
    top, bottom, left, right = plain["crop"]
    return replace(facts, crop=Box(range(top, bottom), range(left, right)))

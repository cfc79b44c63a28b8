"""Accepted work on its way: an edit or a template. An entry is kept, with everything needed to run it again, until it
is answered. Knows stages; no process and no socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple

from instgenie.cluster.orders import Event, Order, TemplateOrder
from instgenie.cluster.status import JobStatus
from instgenie.cluster.wire import Denoised, Frame, Prepared
from instgenie.scheduling.router import Work
from instgenie.scheduling.scheduler import LONG
from instgenie.scheduling.terms import NO_DEADLINE, Terms
from instgenie.types import TierName

StageName = Literal["prepare", "gather", "park", "denoise", "finish"]
MAX_PARKS = 3  # registrations that an edit waits for; a store that loses what was registered is too small for it
MAX_DEATHS = 3  # of processes holding an entry at one stage, before the entry is taken for the cause


class ComputeMode(Enum):
    """How an edit is computed. It is decided once, so that the picture stays the same however often the edit is run."""

    UNDECIDED = auto()  # its worker looks for the template's activations, and decides
    CACHED = auto()  # it uses the activations, on every attempt
    OWN = auto()  # it reads what its own dense steps leave behind
    DENSE = auto()  # it computes every token


class PreparedJob(NamedTuple):
    """Result of the prepare stage."""

    message: Prepared
    tensors: Sequence[Frame]


class DenoisedJob(NamedTuple):
    """Result of the denoise stage."""

    message: Denoised
    latents: Sequence[Frame]


class Numbers:
    """Rising numbers that tell the age of entries, also beside those of other fronts: microseconds of the clock."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return self._last


next_number = Numbers().next


@dataclass(eq=False, kw_only=True)
class Entry:
    """The common part of edits and templates."""

    id: str
    worker: int = 0
    stage: StageName = "prepare"
    attempt: int = 1
    num_deaths: int = 0  # of processes that held it at this stage
    prepared: PreparedJob | None = None
    num_overtaken: int = 0  # younger entries of its tenant that were sent before it
    number: int = field(default_factory=next_number)  # older entries have lower numbers

    @property
    def terms(self) -> Terms:
        return Terms(number=self.number)

    @property
    def request_id(self) -> str:
        """The request that asked for it; empty: none did."""
        return ""

    @property
    def is_suspect(self) -> bool:
        """True if it may be what kills the processes that hold it."""
        return self.num_deaths >= MAX_DEATHS - 1

    def move(self, stage: StageName) -> None:
        self.stage, self.num_deaths = stage, 0

    def lose(self) -> None:
        """Count the death of the process that held it; the next attempt starts the stage again."""
        self.attempt += 1
        self.num_deaths += 1


@dataclass(eq=False, kw_only=True)
class TemplateEntry(Entry):
    """A registration on one worker; its id is the template's."""

    order: TemplateOrder
    is_urgent: bool = False  # True if an edit waits for it

    @property
    def request_id(self) -> str:
        return self.order.request_id


@dataclass(eq=False, kw_only=True)
class EditEntry(Entry):
    order: Order
    work: Work
    group: list["EditEntry"]  # edits that join a batch together, itself among them
    mode: ComputeMode = ComputeMode.DENSE
    tier: TierName | None = None  # where the template's activations were found
    why_dense: str = ""  # the reason, if its mode is DENSE or OWN
    may_own: bool = False  # True: without a template it reads what its own dense steps leave behind
    may_store: bool = True  # False: its picture does not become a template unasked
    num_parks: int = 0  # times that it waited for a registration
    is_running: bool = False  # True while it is in a batch
    joined_at: float = 0.0  # when it last joined a batch
    step: int = 0
    plan: tuple[bool, ...] = ()  # known once it has joined a batch
    denoised: DenoisedJob | None = None
    predicted: float = 0.0  # seconds from acceptance to the picture
    num_preemptions: int = 0
    accepted_at: float = field(default_factory=time.monotonic)
    waits_from: float = field(default_factory=time.monotonic)  # when it began to wait for its stage
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)  # None ends the stream

    @property
    def terms(self) -> Terms:
        return Terms(self.order.deadline, self.order.priority, self.order.tenant, self.number)

    @property
    def request_id(self) -> str:
        return self.order.request_id

    @property
    def template(self) -> str | None:
        """The template whose activations it uses, or looks for."""
        return self.work.template if self.mode in (ComputeMode.UNDECIDED, ComputeMode.CACHED) else None

    @property
    def is_waiting(self) -> bool:
        return not self.is_running and self.stage != "finish"

    @property
    def num_steps(self) -> int:
        return self.prepared.message.num_steps if self.prepared else self.work.num_steps

    @property
    def seconds_per_step(self) -> float:
        """As measured since it joined its batch; 0 if it has taken no step there."""
        return (time.monotonic() - self.joined_at) / self.step if self.is_running and self.step else 0.0

    @property
    def is_long(self) -> bool:
        """True if it would take its steps for so long that others may overtake it."""
        return self.stage == "denoise" and self.num_steps > LONG

    @property
    def num_masked_tokens(self) -> int:
        return self.prepared.message.num_masked_tokens if self.prepared else self.work.num_masked_tokens

    @property
    def num_tokens(self) -> int:
        return self.prepared.message.num_tokens if self.prepared else self.work.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens per step, in the mean."""
        if self.mode is ComputeMode.OWN:
            return round(self.num_masked_tokens + self.work.own_share * (self.num_tokens - self.num_masked_tokens))
        return self.num_masked_tokens if self.mode is ComputeMode.CACHED else self.num_tokens

    def status(self, seconds_left: float = 0.0) -> JobStatus:
        """Describe it, given the predicted seconds of its remaining steps."""
        return JobStatus(
            id=self.id,
            step=self.step,
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            num_masked_tokens=self.num_masked_tokens,
            num_computed_tokens=self.num_computed_tokens,
            plan=self.plan,
            slack=None if self.order.deadline == NO_DEADLINE else self.order.deadline - time.monotonic() - seconds_left,
            num_preemptions=self.num_preemptions,
        )

    @property
    def must_not_run_dense(self) -> bool:
        """True if its client would rather see it fail."""
        return self.order.wish.reuse == "template"

    def run_dense(self, why: str) -> None:
        """Do without a template: have every token computed, or only at the edit's own dense steps. `why` is a clause
        for the client."""
        self.mode = ComputeMode.OWN if self.may_own else ComputeMode.DENSE
        self.tier, self.why_dense = None, why

    def lose(self) -> None:
        super().lose()
        self.step = 0


class Ticket:
    """A client's handle of an accepted edit."""

    def __init__(self, entry: EditEntry, cancel: Callable[[EditEntry], None]) -> None:
        self._entry = entry
        self._cancel = cancel

    @property
    def id(self) -> str:
        return self._entry.id

    def cancel(self) -> None:
        """Drop the edit at its next step; no further event comes."""
        self._cancel(self._entry)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events up to Finished or Failed; a cancelled edit ends without either."""
        while (event := await self._entry.events.get()) is not None:
            yield event

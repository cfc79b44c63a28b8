"""Accepted work on its way: each entry is kept, with all it takes to do it again, until it is answered. Knows stages;
no process and no socket."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from instgenie.cluster.orders import Event, Order, Tier
from instgenie.cluster.status import JobStatus
from instgenie.cluster.wire import Denoised, Frame, Prepared
from instgenie.scheduling.router import Work
from instgenie.types import Pixels

Stage = Literal["prepare", "gather", "park", "denoise", "finish"]
MAX_DEATHS = 3  # of processes that held an entry at one stage, before it is taken for the cause


@dataclass(frozen=True, eq=False)
class Registering:
    """A template to register."""

    tenant: str
    size: tuple[int, int]  # (height, width) of the picture
    steps: int
    guidance: float
    picture: Pixels | None  # None: it lies with the activations


@dataclass(eq=False)
class Entry:
    id: str
    order: Order | Registering
    work: Work
    group: list["Entry"]  # what joins a batch together; itself among them
    worker: int = 0
    stage: Stage = "prepare"
    attempt: int = 1
    num_deaths: int = 0  # of processes that held it at this stage
    template: str | None = None  # whose activations it uses, if they are found
    is_sure: bool = False  # that it uses them: once it does, every attempt does, so that its picture stays the same
    is_told: bool = False  # whether they were found, to who counts
    tier: Tier | None = None  # where they were found
    is_running: bool = False
    is_urgent: bool = False  # a template that an edit waits for
    step: int = 0
    plan: tuple[bool, ...] = ()  # told when it joined
    prepared: Prepared | None = None
    tensors: Sequence[Frame] = ()  # of the prepared job
    denoised: Denoised | None = None
    latents: Sequence[Frame] = ()
    position: int = -1  # last told
    number: int = field(default_factory=itertools.count().__next__)  # the oldest has the lowest
    accepted_at: float = field(default_factory=time.monotonic)
    waits_from: float = field(default_factory=time.monotonic)  # for its stage to begin
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)  # None: no more will come

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills the processes that hold it."""
        return self.num_deaths >= MAX_DEATHS - 1

    @property
    def is_waiting(self) -> bool:
        return isinstance(self.order, Order) and not self.is_running and self.stage != "finish"

    @property
    def num_steps(self) -> int:
        return self.prepared.num_steps if self.prepared else self.work.num_steps

    @property
    def edit(self) -> Order:
        assert isinstance(self.order, Order)
        return self.order

    @property
    def num_masked_tokens(self) -> int:
        return self.prepared.num_masked_tokens if self.prepared else self.work.num_masked_tokens

    @property
    def num_tokens(self) -> int:
        return self.prepared.num_tokens if self.prepared else self.work.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Of a step."""
        return self.num_masked_tokens if self.is_sure else self.num_tokens

    @property
    def status(self) -> JobStatus:
        return JobStatus(
            id=self.id,
            step=self.step,
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            num_masked_tokens=self.num_masked_tokens,
            num_computed_tokens=self.num_computed_tokens,
            plan=self.plan,
        )

    def move(self, stage: Stage) -> None:
        self.stage, self.num_deaths = stage, 0

    def run_dense(self) -> None:
        self.template, self.is_sure, self.tier = None, False, None

    def lose(self) -> None:
        """The process that held it is gone."""
        self.attempt += 1
        self.num_deaths += 1
        self.step = 0


class Ticket:
    """What a client holds while its order is worked on."""

    def __init__(self, entry: Entry, cancel: Callable[[Entry], None]) -> None:
        self._entry = entry
        self._cancel = cancel

    @property
    def id(self) -> str:
        return self._entry.id

    def cancel(self) -> None:
        """Takes effect at the next step; no further event comes."""
        self._cancel(self._entry)

    async def events(self) -> AsyncIterator[Event]:
        """Ends with Finished or Failed, unless it was cancelled."""
        while (event := await self._entry.events.get()) is not None:
            yield event

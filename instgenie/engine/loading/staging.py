"""Staging: rows of whole kept steps, brought to the device ahead of their use. Knows activations and streams; knows no
pass.

Edits that one kept step of a template serves share its rows, which stay until no coming step of an edit reads them.
Rows that are adjacent in memory move as one piece. Copies run on a stream of their own, beside the previous step; the
computation waits for all rows of its step at once, so the order of the pass does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from instgenie.engine.loading.route import places_of
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job

StageKey: TypeAlias = tuple[int, int]  # address of the first rows of a step, and number of branches kept
RowsKey: TypeAlias = tuple[int, int]  # place and branch
MAX_GAP = 256  # bytes of alignment padding between rows of one piece


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows that are adjacent in memory and move together."""

    activations: Activations
    rows: dict[RowsKey, Tensor] = field(default_factory=dict)  # [2 or 1, tokens, width or bytes]

    @property
    def first(self) -> Tensor:
        return next(iter(self.rows.values()))

    @property
    def last(self) -> Tensor:
        return next(reversed(self.rows.values()))

    def goes_on_with(self, rows: Tensor) -> bool:
        gap = rows.data_ptr() - end_of(self.last)
        return 0 <= gap <= MAX_GAP and rows.untyped_storage().data_ptr() == self.first.untyped_storage().data_ptr()

    def bring(self, device: torch.device) -> "Brought":
        """Copy the rows to a device, as they are kept."""
        memory = all_bytes(self.first, self.last).to(device, non_blocking=True)
        return Brought(memory, {key: rows.data_ptr() - self.first.data_ptr() for key, rows in self.rows.items()})


class Brought(NamedTuple):
    """Memory on the device, and the offsets of rows in it."""

    memory: Tensor
    offsets: dict[RowsKey, int]  # in bytes


@dataclass(frozen=True, eq=False)
class Staged:
    """The rows of one step of a template that are on the device."""

    activations: Activations  # kept alive while their rows are read
    addresses: dict[RowsKey, int] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)  # behind the addresses
    ready: list[torch.cuda.Event] = field(default_factory=list)


class Staging:
    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.staged: dict[StageKey, Staged] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.before: torch.cuda.Event | None = None

    def has_room(self, jobs: Sequence[Job]) -> bool:
        """Return whether the rows of the jobs' present and next steps fit."""
        steps = [(job.activations, job.step) for job in jobs if job.activations]
        num_bytes = {stage_key(*one): num_step_bytes(one[0]) for one in steps}
        return 2 * sum(num_bytes.values()) <= self.max_bytes

    def bring(self, jobs: Sequence[Job]) -> None:
        """Bring the rows of the jobs' present steps, and let what is computed from here on wait for them."""
        self.start(jobs, num_ahead=0)
        for key in keys_of(jobs, num_ahead=0):
            for ready in self.staged[key].ready:
                torch.cuda.current_stream(self.device).wait_event(ready)

    def mark(self) -> None:
        """Mark the point that the next copies wait for. Started earlier, they could overwrite rows that are still read,
        and the small copies that a step waits for would queue behind the large ones."""
        if self.stream:
            self.before = torch.cuda.current_stream(self.device).record_event()

    def look_ahead(self, jobs: Sequence[Job]) -> None:
        """Start to bring the rows of the jobs' next steps, and of the next kept steps, beside the computing of the
        present ones, if there is room, and drop all other rows."""
        coming = jobs if self.has_room(jobs) else ()
        needed = [(jobs, 0), (coming, 1), *(([job], num_until_next(job)) for job in coming)]
        keys = {key for some, num_ahead in needed for key in keys_of(some, num_ahead)}
        old = [key for key in self.staged if key not in keys]
        if self.stream and self.before:
            self.stream.wait_event(self.before)
        for key in old:
            del self.staged[key]
        for some, num_ahead in needed[1:]:
            self.start(some, num_ahead)

    def start(self, jobs: Sequence[Job], num_ahead: int) -> None:
        for job in jobs:
            if places := places_of(job, num_ahead):
                assert job.activations is not None
                self.stage(job.activations, job.step + num_ahead, places)

    def stage(self, activations: Activations, step: int, places: Sequence[int]) -> None:
        """Bring those of these places that are not there yet."""
        staged = self.staged.setdefault(stage_key(activations, step), Staged(activations))
        missing = [place for place in places if (place, 0) not in staged.addresses]
        if not missing:
            return
        with torch.cuda.stream(self.stream):
            for piece in find_pieces(activations, step, missing):
                memory, offsets = piece.bring(self.device)
                staged.memory.append(memory)
                start = memory.data_ptr()
                staged.addresses.update({key: start + offset for key, offset in offsets.items()})
            if self.stream:
                staged.ready.append(self.stream.record_event())

    def addresses(self, job: Job, branch: int) -> list[int]:
        """Addresses of the rows of the job's present step, place after place; 0 where it reads none."""
        assert job.activations is not None
        addresses = self.staged[stage_key(job.activations, job.step)].addresses
        branch = min(branch, job.activations.num_branches - 1)
        return [addresses.get((place, branch), 0) for place in range(len(job.activations.rows))]


def find_pieces(activations: Activations, step: int, places: Sequence[int]) -> list[Piece]:
    """Group rows into as few pieces as their addresses allow."""
    pieces: list[Piece] = []
    for key in product(places, range(activations.num_branches)):
        rows = activations.kept(step, *key)
        assert rows.is_contiguous()
        if not pieces or not pieces[-1].goes_on_with(rows):
            pieces.append(Piece(activations))
        pieces[-1].rows[key] = rows
    return pieces


def end_of(rows: Tensor) -> int:
    return rows.data_ptr() + rows.nbytes


def all_bytes(first: Tensor, last: Tensor) -> Tensor:
    """The bytes from the start of one tensor to the end of another in the same storage."""
    num_bytes = end_of(last) - first.data_ptr()
    start = first.storage_offset() * first.element_size()
    nothing = torch.empty(0, dtype=torch.uint8, device=first.device)
    return nothing.set_(first.untyped_storage(), start, (num_bytes,), (1,))


def keys_of(jobs: Sequence[Job], num_ahead: int) -> list[StageKey]:
    """Keys of what the jobs read `num_ahead` steps later."""
    return [
        stage_key(job.activations, job.step + num_ahead)
        for job in jobs
        if job.activations and places_of(job, num_ahead)
    ]


def num_until_next(job: Job) -> int:
    """Steps until another kept step serves the job; 1 if none will."""
    cache = job.activations
    assert cache is not None
    steps = range(1, job.num_steps - job.step)
    return next((ahead for ahead in steps if cache.slot(job.step + ahead) != cache.slot(job.step)), 1)


def stage_key(activations: Activations, step: int) -> StageKey:
    return activations.kept(step, 0, 0).data_ptr(), activations.num_branches


def num_step_bytes(activations: Activations) -> int:
    """Bytes of one step's rows."""
    return sum(rows[:, 0].nbytes for rows in activations.rows)

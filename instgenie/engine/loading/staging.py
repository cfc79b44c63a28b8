"""Staging: rows of whole steps, brought to the device one step ahead of their use. Knows activations and streams;
knows no pass.

Edits that are at one step of one template share their rows. Rows that are adjacent in memory move as one piece. Copies
run on a stream of their own, beside the previous step; the computation waits for all rows of its step at once, so the
order of the pass does not matter.
"""

from collections.abc import Iterator, Sequence
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

    def bring(self, device: torch.device) -> list["Brought"]:
        """Copy the rows to a device, unpacked."""
        memory = all_bytes(self.first, self.last).to(device, non_blocking=True)
        offsets = {key: rows.data_ptr() - self.first.data_ptr() for key, rows in self.rows.items()}
        if not self.activations.is_packed:
            return [Brought(memory, offsets)]
        return [self.unpack(memory, offsets, keys) for keys in self.alike()]

    def alike(self) -> Iterator[list[RowsKey]]:
        """Yield runs of rows of one shape without gaps."""
        run: list[RowsKey] = []
        for key, rows in self.rows.items():
            last = self.rows[run[-1]] if run else None
            if last is not None and (rows.data_ptr() != end_of(last) or rows.shape != last.shape):
                yield run
                run = []
            run.append(key)
        yield run

    def unpack(self, memory: Tensor, offsets: dict[RowsKey, int], keys: Sequence[RowsKey]) -> "Brought":
        one = self.rows[keys[0]]
        packed = memory[offsets[keys[0]] :][: len(keys) * one.nbytes].view(len(keys), *one.shape)
        rows = self.activations.readable(packed)
        return Brought(rows, {key: index * rows[0].nbytes for index, key in enumerate(keys)})


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
        """Start to bring the rows of the jobs' next steps beside the computing of the present ones, if there is room,
        and drop the rows of all other steps."""
        coming = jobs if self.has_room(jobs) else ()
        keys = {*keys_of(jobs, num_ahead=0), *keys_of(coming, num_ahead=1)}
        old = [key for key in self.staged if key not in keys]
        if self.stream and self.before:
            self.stream.wait_event(self.before)
        for key in old:
            del self.staged[key]
        self.start(coming, num_ahead=1)

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
                for memory, offsets in piece.bring(self.device):
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


def stage_key(activations: Activations, step: int) -> StageKey:
    return activations.kept(step, 0, 0).data_ptr(), activations.num_branches


def num_step_bytes(activations: Activations) -> int:
    """Bytes of one step's rows when unpacked; packed rows are at least half as large."""
    return sum(rows[:, 0].nbytes for rows in activations.rows) * (2 if activations.is_packed else 1)

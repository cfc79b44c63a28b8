"""Rows of whole steps, brought to where the device reads them one step ahead of their use. Knows activations and
streams; knows no pass.

Edits that are at one step of one template share what is brought. Rows that lie behind each other move as one piece.
Copies run on a stream of their own, beside the step before; whoever computes waits for all of a step's rows at once, so
nothing has to be known of the order of the pass.
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

StageKey: TypeAlias = tuple[int, int]  # where the first rows of a step lie, and how many branches have some
RowsKey: TypeAlias = tuple[int, int]  # place and branch
MAX_GAP = 256  # bytes of nothing that may lie between rows of one piece, to align them


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows that lie behind each other, and move as one."""

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
        """As the model reads them."""
        memory = all_bytes(self.first, self.last).to(device, non_blocking=True)
        offsets = {key: rows.data_ptr() - self.first.data_ptr() for key, rows in self.rows.items()}
        if not self.activations.is_packed:
            return [Brought(memory, offsets)]
        return [self.unpack(memory, offsets, keys) for keys in self.alike()]

    def alike(self) -> Iterator[list[RowsKey]]:
        """Runs of rows of one shape with nothing in between."""
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
    """Memory of the device, and where in it rows lie."""

    memory: Tensor
    offsets: dict[RowsKey, int]  # in bytes


@dataclass(frozen=True, eq=False)
class Staged:
    """What is read of one step of a template."""

    activations: Activations  # whose rows they are: not forgotten while they are read
    addresses: dict[RowsKey, int] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)  # in which they lie
    ready: list[torch.cuda.Event] = field(default_factory=list)


class Staging:
    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.staged: dict[StageKey, Staged] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.before: torch.cuda.Event | None = None

    def has_room(self, jobs: Sequence[Job]) -> bool:
        """For the rows of the jobs' present steps and those after."""
        steps = [(job.activations, job.step) for job in jobs if job.activations]
        num_bytes = {stage_key(*one): num_step_bytes(one[0]) for one in steps}
        return 2 * sum(num_bytes.values()) <= self.max_bytes

    def bring(self, jobs: Sequence[Job]) -> None:
        """Lets whoever computes from here on wait for the rows of the jobs' present steps."""
        self.start(jobs, num_ahead=0)
        for key in keys_of(jobs, num_ahead=0):
            for ready in self.staged[key].ready:
                torch.cuda.current_stream(self.device).wait_event(ready)

    def mark(self) -> None:
        """What is brought next comes beside what is computed from here on, not earlier: what was computed before reads
        rows that go then, and small copies that a step waits for would queue behind large ones."""
        if self.stream:
            self.before = torch.cuda.current_stream(self.device).record_event()

    def look_ahead(self, jobs: Sequence[Job]) -> None:
        """Starts to bring the rows of the jobs' next steps beside the computing of the present ones, if there is room;
        of others, nothing is kept."""
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
        """Of these places, those that are not there yet."""
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
        """Where the rows of its present step are, place after place; 0 where it reads none."""
        assert job.activations is not None
        addresses = self.staged[stage_key(job.activations, job.step)].addresses
        branch = min(branch, job.activations.num_branches - 1)
        return [addresses.get((place, branch), 0) for place in range(len(job.activations.rows))]


def find_pieces(activations: Activations, step: int, places: Sequence[int]) -> list[Piece]:
    """As few as the rows' places in memory allow."""
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
    """From where one begins to where the other ends, in the storage of both [bytes]."""
    num_bytes = end_of(last) - first.data_ptr()
    start = first.storage_offset() * first.element_size()
    nothing = torch.empty(0, dtype=torch.uint8, device=first.device)
    return nothing.set_(first.untyped_storage(), start, (num_bytes,), (1,))


def keys_of(jobs: Sequence[Job], num_ahead: int) -> list[StageKey]:
    """Of what they read so many steps later."""
    return [
        stage_key(job.activations, job.step + num_ahead)
        for job in jobs
        if job.activations and places_of(job, num_ahead)
    ]


def stage_key(activations: Activations, step: int) -> StageKey:
    return activations.rows[0][0, step].data_ptr(), activations.num_branches


def num_step_bytes(activations: Activations) -> int:
    """As the model reads them; packed ones are smaller by less than half."""
    return sum(rows[:, 0].nbytes for rows in activations.rows) * (2 if activations.is_packed else 1)

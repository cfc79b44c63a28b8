"""Staging: rows of whole kept steps, brought to the device ahead of their use. Knows activations and streams; knows no
pass.

Edits that one kept step of a template serves share its rows, which stay until no coming step of an edit reads them.
Rows that are adjacent in memory move as one piece. Copies run on a stream of their own, beside the previous step. The
computation waits at once for all rows that set out then, and gate after gate for those that set out with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from instgenie.engine.loading.gates import NUM_GATES, Gates, gate_of
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

    def pack(self, device: torch.device) -> "Parcel":
        """Make room for the rows on a device, as they are kept. On their own device they stay where they are."""
        kept = all_bytes(self.first, self.last)
        memory = kept if kept.device == device else torch.empty_like(kept, device=device)
        offsets = {key: rows.data_ptr() - self.first.data_ptr() for key, rows in self.rows.items()}
        return Parcel(kept, memory, offsets)


class Parcel(NamedTuple):
    """Bytes of rows, room for them on the device, and the offsets of the rows in both."""

    kept: Tensor
    memory: Tensor
    offsets: dict[RowsKey, int]

    def send(self) -> None:
        if self.memory is not self.kept:
            self.memory.copy_(self.kept, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Staged:
    """The rows of one step of a template that are on the device."""

    activations: Activations  # kept alive while their rows are read
    addresses: dict[RowsKey, int] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)  # behind the addresses
    ready: list[torch.cuda.Event] = field(default_factory=list)


class Shipment(NamedTuple):
    """Parcels that travel together."""

    staged: Staged
    parcels: list[Parcel]


class Staging:
    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.staged: dict[StageKey, Staged] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.gates = Gates(device)
        self.before: torch.cuda.Event | None = None
        self.waiting: list[tuple[int, Shipment]] = []  # with the gate behind which they are read

    def has_room(self, jobs: Sequence[Job]) -> bool:
        """Return whether the rows of the jobs' present and next steps fit."""
        steps = [(job.activations, job.step) for job in jobs if job.activations]
        num_bytes = {stage_key(*one): num_step_bytes(one[0]) for one in steps}
        return 2 * sum(num_bytes.values()) <= self.max_bytes

    def bring(self, jobs: Sequence[Job]) -> None:
        """Bring the rows of the jobs' present steps. What is computed from here on waits for those that are on their
        way already. Of the others those behind the first gate set out now, the rest at the mark."""
        for key in keys_of(jobs, num_ahead=0):
            for ready in self.staged[key].ready if key in self.staged else ():
                torch.cuda.current_stream(self.device).wait_event(ready)
        self.waiting += [
            (gate, shipment) for gate in range(NUM_GATES) for shipment in self.pack(jobs, num_ahead=0, gate=gate)
        ]
        self.send_waiting(last_gate=0)

    def mark(self) -> None:
        """Mark the point that the next copies wait for. Started earlier, they could overwrite rows that are still read,
        and the small copies that a step waits for would queue behind the large ones."""
        if self.stream:
            self.before = torch.cuda.current_stream(self.device).record_event()
            if self.waiting:
                self.stream.wait_event(self.before)
        self.send_waiting(last_gate=NUM_GATES - 1)

    def send_waiting(self, last_gate: int) -> None:
        """Send what waits, up to a gate, and open each gate when what is read behind it has come."""
        for gate, shipment in self.waiting:
            if gate <= last_gate:
                self.send(shipment)
                self.gates.open(gate, self.stream)
        self.waiting = [one for one in self.waiting if one[0] > last_gate]

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
            for shipment in self.pack(some, num_ahead):
                self.send(shipment)

    def pack(self, jobs: Sequence[Job], num_ahead: int, gate: int | None = None) -> Iterator[Shipment]:
        """Pack what is missing of the rows that the jobs read in a later step: of all places, or of those behind a
        gate."""
        for job in jobs:
            if places := places_of(job, num_ahead):
                assert job.activations is not None
                num_places, rank = len(job.activations.rows), job.activations.rank
                behind = [place for place in places if gate is None or gate_of(rank(place), num_places) == gate]
                if shipment := self.pack_places(job.activations, job.step + num_ahead, behind):
                    yield shipment

    def pack_places(self, activations: Activations, step: int, places: Sequence[int]) -> Shipment | None:
        staged = self.staged.setdefault(stage_key(activations, step), Staged(activations))
        missing = [place for place in places if (place, 0) not in staged.addresses]
        if not missing:
            return None
        with torch.cuda.stream(self.stream):
            parcels = [piece.pack(self.device) for piece in find_pieces(activations, step, missing)]
        for parcel in parcels:
            start = parcel.memory.data_ptr()
            staged.addresses.update({key: start + offset for key, offset in parcel.offsets.items()})
            staged.memory.append(parcel.memory)
        return Shipment(staged, parcels)

    def send(self, shipment: Shipment) -> None:
        with torch.cuda.stream(self.stream):
            for parcel in shipment.parcels:
                parcel.send()
            if self.stream:
                shipment.staged.ready.append(self.stream.record_event())

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

"""Brings rows of activations to the model's device ahead of their use, through a ring of buffers. Knows the order in
which a step reads; a lane knows how bytes move.

The stops of a route take the buffers in turn, starting with the first buffer at every step. When the next stop is read,
the buffer of the previous one is free again, and the next transfers that are due go there. At the end of a step the
first transfers of the next step are started, as far as the ring reaches.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from instgenie.cache.buffers import TensorSpec, carve
from instgenie.cost.plan import Plan
from instgenie.engine.loading.lanes import Lane, RowChoice, Transfer, make_lane
from instgenie.engine.loading.route import Route, SharedRows, StopPart, make_route, needs_loading, sharing_key
from instgenie.jobs.job import Job, chooses
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.kernels.packed import PackedRows
from instgenie.models.model import Model

RING_SHARE = 1 / 32  # of a CUDA device's memory, the most that the ring takes
RING_BYTES = 2**28  # the same on other devices
MIN_BUFFERS = 2  # one is read while the other is filled
NOWHERE = Route((), ())


class Loader:
    """Serves one step loop. With a single buffer nothing is loaded ahead: every transfer starts when the computation
    asks for its rows, and the computation waits for it."""

    def __init__(self, model: Model, max_buffers: int | None = None, rows: RowChoice = "auto") -> None:
        self.model = model
        self.max_buffers = max_buffers
        self.ring_bytes = choose_ring_bytes(model.device)
        self.lane: Lane = make_lane(model.device, rows)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.route = NOWHERE
        self.rooms: list[list[Tensor]] = []  # per stop, per part
        self.num_buffers = 1
        self.stop = -1  # the one being read
        self.num_started = 0
        self.transfers: dict[int, list[Transfer]] = {}  # per stop that is started and not yet released
        self.held: dict[int, object] = {}  # per stop whose buffer is its own: what was last loaded into it
        self.taken: dict[int, Tensor | PackedRows] = {}  # per part of this stop, as the model reads it
        self.described = describe(())  # the jobs whose route it is
        self.step = 0  # of the first of them, for which transfers are started

    @contextmanager
    def loading(self, jobs: Sequence[Job]) -> Iterator[StepRows]:
        """Yield the rows of one step of the jobs, loaded ahead of their use."""
        self.start(jobs)
        yield LoadedRows(self, {job: shared for shared in self.route.shared for job in shared.jobs})

    def start(self, jobs: Sequence[Job]) -> None:
        """Start the first transfers of a step of these jobs, unless they are started already."""
        described, step = describe(jobs), jobs[0].step if jobs else 0
        if self.described == described and self.step == step and self.stop < 0:
            return
        self.release(0, self.num_started)
        self.stop, self.num_started = -1, 0
        if self.described != described:
            self.turn_to(make_route(self.model.passes(jobs)) if any(map(needs_loading, jobs)) else NOWHERE)
        self.described, self.step = described, step
        self.start_transfers()

    def forget(self, jobs: Collection[Job]) -> None:
        """Let go of jobs that have left: what they keep for themselves goes with them."""
        if any(job in jobs for job, *_ in self.described):
            self.start(())

    def turn_to(self, route: Route) -> None:
        forms = [[self.form(part) for part in parts] for parts in route.stops]
        sizes = [sum(form.num_bytes for form in stop) for stop in forms]
        size = max(sizes, default=0)
        self.num_buffers = self.choose_num_buffers(size, len(route.stops))
        self.lane.settle({needed(part) for parts in route.stops for part in parts})
        if size * self.num_buffers > len(self.memory):
            self.rooms.clear()
            self.memory = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is allocated
            self.memory = self.lane.make_room(size * self.num_buffers)
        buffers = [self.memory[size * index :][:size] for index in range(self.num_buffers)]
        self.rooms = [carve(buffers[self.buffer(stop)], form) for stop, form in enumerate(forms)]
        self.route = route
        self.held.clear()

    def form(self, part: StopPart) -> TensorSpec:
        return self.lane.form(part.shared.activations, part.shared.kept(part.place, part.branch))

    def choose_num_buffers(self, size: int, num_stops: int) -> int:
        most = max(self.ring_bytes // max(size, 1), MIN_BUFFERS)
        return max(min(num_stops, most, self.max_buffers or num_stops), 1)

    def buffer(self, stop: int) -> int:
        return stop % self.num_buffers

    def read(self, shared: SharedRows, place: int, branch: int) -> Tensor | PackedRows:
        stop, part = self.route.where[shared, place, min(branch, len(shared.branches) - 1)]
        if stop != self.stop:
            self.move(stop)
        if part not in self.taken:
            self.taken[part] = self.lane.take(self.transfers[stop][part])
        return self.taken[part]

    def move(self, stop: int) -> None:
        assert stop > self.stop, (stop, self.stop)
        self.release(max(self.stop, 0), stop)
        self.stop = stop
        self.start_transfers()
        self.wait(stop)

    def wait(self, stop: int) -> None:
        self.lane.wait(self.buffer(stop))

    def release(self, first: int, end: int) -> None:
        """Release the stops from `first` to before `end`."""
        self.taken.clear()
        for stop in range(first, end):
            if self.transfers.pop(stop, None):
                self.lane.release(self.buffer(stop))

    def start_transfers(self) -> None:
        """Start transfers as far as the ring reaches from the stop being read. A buffer that still has the rows of its
        stop, because one kept step serves several steps, is not filled again."""
        end = min(max(self.stop, 0) + self.num_buffers, len(self.route.stops))
        for stop in range(self.num_started, end):
            parts = self.route.stops[stop]
            self.transfers[stop] = list(map(make_transfer, parts, self.rooms[stop]))
            wanted = [sharing_key(part.shared.jobs[0]) for part in parts]
            if self.held.get(stop) != wanted:
                self.lane.start(self.buffer(stop), self.transfers[stop])
                if self.num_buffers == len(self.route.stops):
                    self.held[stop] = wanted
        self.num_started = max(self.num_started, end)


class LoadedRows:
    """Rows of a step that come through a loader; those of jobs that need no loading come from their activations."""

    def __init__(self, loader: Loader, shared: dict[Job, SharedRows]) -> None:
        self.loader, self.shared = loader, shared

    def read(self, job: Job, place: int, branch: int) -> Tensor | PackedRows:
        shared = self.shared.get(job)
        return OWN_ROWS.read(job, place, branch) if shared is None else self.loader.read(shared, place, branch)


def make_transfer(part: StopPart, room: Tensor) -> Transfer:
    kept = part.shared.kept(part.place, part.branch)
    return Transfer(part.place, part.shared.activations, kept, needed(part), room)


def needed(part: StopPart) -> Tensor:
    return part.shared.needed(part.place)


def describe(jobs: Sequence[Job]) -> list[tuple[Job, object, Plan, tuple[bool, bool], int]]:
    """A value that stays equal while the same jobs read the same places and share them the same way."""
    groups: dict[object, int] = {}  # numbers of what jobs share, in the order of the jobs
    return [
        (
            job,
            job.activations,
            job.present_plan,
            (job.loras is None, chooses(job)),  # which jobs share a pass depends on them
            groups.setdefault(sharing_key(job) if job.activations else job, len(groups)),
        )
        for job in jobs
    ]


def choose_ring_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return RING_BYTES
    return int(RING_SHARE * torch.cuda.get_device_properties(device).total_memory)

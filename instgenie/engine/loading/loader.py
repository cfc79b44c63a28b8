"""Brings rows of activations to the model's device ahead of their use, through a ring of buffers. Knows in which order
a step reads; how bytes move is the lane's matter.

The stops of a route take the buffers in turn, the first stop of every step the first buffer. When the next stop is
read, the buffer of the one before is free again, and the next load that is due goes there. At the end of a step the
first loads of the step to come are started, as far as the ring reaches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from instgenie.cache.buffers import TensorSpec, carve
from instgenie.cost.plan import Plan
from instgenie.engine.loading.lanes import Lane, Load, Rows, make_lane
from instgenie.engine.loading.route import Part, Route, Source, make_route, needs_loading
from instgenie.jobs.job import Job
from instgenie.models.model import Model

RING_SHARE = 1 / 32  # of a CUDA device's memory that the ring may take, where a step has so much to load
RING_BYTES = 2**28  # the same elsewhere
MIN_BUFFERS = 2  # one is read while the other is filled
NOWHERE = Route((), ())


class Loader:
    """Used by one step loop. With a single buffer nothing is loaded ahead: every load waits until what computes asks
    for it, and is waited for."""

    def __init__(self, model: Model, max_buffers: int | None = None, rows: Rows = "auto") -> None:
        self.model = model
        self.max_buffers = max_buffers
        self.ring_bytes = choose_ring_bytes(model.device)
        self.lane: Lane = make_lane(model.device, rows)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.route = NOWHERE
        self.rooms: list[list[Tensor]] = []  # of each stop, of each part
        self.num_buffers = 1
        self.stop = -1  # that is read
        self.num_started = 0
        self.loads: dict[int, list[Load]] = {}  # of each stop that is started and not done with
        self.taken: dict[int, Tensor] = {}  # of each part of this stop, as the model reads it
        self.described = describe(())  # of the jobs whose route it is
        self.step = 0  # of the first of them, for which loads are started

    @contextmanager
    def loading(self, jobs: Sequence[Job]) -> Iterator[None]:
        """While it lasts, the jobs read what is loaded ahead."""
        self.start(jobs)
        try:
            for source in self.route.sources:
                for job in source.jobs:
                    job.reader = SourceReader(self, source)
            yield
        finally:
            for job in jobs:
                job.reader = None

    def start(self, jobs: Sequence[Job]) -> None:
        """Starts the first loads of a step of these jobs, unless they are started already."""
        described, step = describe(jobs), jobs[0].step if jobs else 0
        if self.described == described and self.step == step and self.stop < 0:
            return
        self.release(0, self.num_started)
        self.stop, self.num_started = -1, 0
        if self.described != described:
            self.turn_to(make_route(self.model.passes(jobs)) if any(map(needs_loading, jobs)) else NOWHERE)
        self.described, self.step = described, step
        self.start_loads()

    def turn_to(self, route: Route) -> None:
        forms = [[self.form(part) for part in parts] for parts in route.stops]
        sizes = [sum(form.num_bytes for form in stop) for stop in forms]
        size = max(sizes, default=0)
        self.num_buffers = self.choose_num_buffers(size, len(route.stops))
        self.lane.settle({needed(part) for parts in route.stops for part in parts})
        if size * self.num_buffers > len(self.memory):
            self.rooms.clear()
            self.memory = torch.empty(0, dtype=torch.uint8)  # it goes before there is more
            self.memory = self.lane.make_room(size * self.num_buffers)
        buffers = [self.memory[size * index :][:size] for index in range(self.num_buffers)]
        self.rooms = [carve(buffers[self.buffer(stop)], form) for stop, form in enumerate(forms)]
        self.route = route

    def form(self, part: Part) -> TensorSpec:
        return self.lane.form(part.source.activations, part.source.kept(part.place, part.branch))

    def choose_num_buffers(self, size: int, num_stops: int) -> int:
        most = max(self.ring_bytes // max(size, 1), MIN_BUFFERS)
        return max(min(num_stops, most, self.max_buffers or num_stops), 1)

    def buffer(self, stop: int) -> int:
        return stop % self.num_buffers

    def read(self, source: Source, place: int, branch: int) -> Tensor:
        stop, part = self.route.where[source, place, min(branch, len(source.branches) - 1)]
        if stop != self.stop:
            self.move(stop)
        if part not in self.taken:
            self.taken[part] = self.lane.take(self.loads[stop][part])
        return self.taken[part]

    def move(self, stop: int) -> None:
        assert stop > self.stop, (stop, self.stop)
        self.release(max(self.stop, 0), stop)
        self.stop = stop
        self.start_loads()
        self.wait(stop)

    def wait(self, stop: int) -> None:
        self.lane.wait(self.buffer(stop))

    def release(self, first: int, end: int) -> None:
        """Stops that are done with."""
        self.taken.clear()
        for stop in range(first, end):
            if self.loads.pop(stop, None):
                self.lane.release(self.buffer(stop))

    def start_loads(self) -> None:
        """As far as the ring reaches from the stop that is read."""
        end = min(max(self.stop, 0) + self.num_buffers, len(self.route.stops))
        for stop in range(self.num_started, end):
            parts = zip(self.route.stops[stop], self.rooms[stop], strict=True)
            self.loads[stop] = [make_load(part, room) for part, room in parts]
            self.lane.start(self.buffer(stop), self.loads[stop])
        self.num_started = max(self.num_started, end)


class SourceReader:
    """What a job reads through; see `activations.Reader`."""

    def __init__(self, loader: Loader, source: Source) -> None:
        self.loader, self.source = loader, source

    def at(self, step: int, place: int, branch: int, device: torch.device) -> Tensor:
        return self.loader.read(self.source, place, branch)


def make_load(part: Part, room: Tensor) -> Load:
    source = part.source
    kept = source.kept(part.place, part.branch)
    return Load(part.place, source.activations, kept, source.needed(kept.shape[1]), room)


def needed(part: Part) -> Tensor:
    return part.source.needed(part.source.kept(part.place, part.branch).shape[1])


def describe(jobs: Sequence[Job]) -> list[tuple[Job, object, Plan, int]]:
    """Equal while the same jobs read the same places, and none falls behind the others."""
    return [(job, job.activations, job.present_plan, job.step - jobs[0].step) for job in jobs]


def choose_ring_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return RING_BYTES
    return int(RING_SHARE * torch.cuda.get_device_properties(device).total_memory)

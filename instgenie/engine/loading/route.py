"""Routes: the rows that a step has to load, in the order in which it reads them. Knows jobs and plans; moves nothing.

A route has a stop for each place of the pass at which any job reads. Jobs that one kept step of a template serves
share its rows. While the same jobs go on sharing the same way, their route stays the same from step to step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from instgenie.cost.plan import Plan
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job, reads_convolutions
from instgenie.jobs.tokens import with_padding


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The rows of one kept step of a template, for all jobs of a pass that it serves."""

    jobs: tuple[Job, ...]

    @property
    def activations(self) -> Activations:
        activations = self.jobs[0].activations
        assert activations is not None
        return activations

    def kept(self, place: int, branch: int) -> Tensor:
        """The rows of a place that serve the jobs' present step [2 or 1, tokens, width or bytes]"""
        return self.activations.kept(self.jobs[0].step, place, branch)

    @cached_property
    def places(self) -> frozenset[int]:
        return frozenset(place for job in self.jobs for place in places_of(job))

    @property
    def branches(self) -> range:
        """Branches that are kept and read."""
        return range(min(max(len(job.branches) for job in self.jobs), self.activations.num_branches))

    @cached_property
    def _needed(self) -> dict[tuple[int, bool], Tensor]:
        return {}

    def needed(self, place: int) -> Tensor:
        """Indices of the rows that any of the jobs reads at a place [rows]; found once for places of one size. All
        rows of what is kept for convolutions are moved."""
        num_rows, is_whole = self.kept(place, 0).shape[1], place >= self.activations.num_places
        key = num_rows, is_whole
        if key not in self._needed:
            every = [torch.arange(num_rows, device=self.jobs[0].device)]
            read = every if is_whole else [rows_read(job, num_rows) for job in self.jobs]
            self._needed[key] = read[0] if len(read) == 1 else union(read, num_rows)
        return self._needed[key]


def rows_read(job: Job, num_rows: int) -> Tensor:
    """Indices of the rows that a job reads of the `num_rows` that its activations keep at a place."""
    num_text = job.activations.num_text if job.activations else 0
    rest = job.level(num_rows - num_text).outside if job.reference is None else job.rest
    return with_padding(rest, num_text, 0 if job.branches[0].num_facts else job.num_prompt) if num_text else rest


def union(indices: Sequence[Tensor], num_rows: int) -> Tensor:
    chosen = torch.zeros(num_rows, dtype=torch.bool, device=indices[0].device)
    return chosen.index_fill_(0, torch.cat(list(indices)), True).nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class StopPart:
    """One piece of what is read at a stop."""

    shared: SharedRows
    place: int
    branch: int


@dataclass(frozen=True, eq=False)
class Route:
    shared: tuple[SharedRows, ...]
    stops: tuple[tuple[StopPart, ...], ...]

    @cached_property
    def where(self) -> dict[tuple[SharedRows, int, int], tuple[int, int]]:
        """The number of the stop and of the part in it, for everything that is read."""
        return {
            (part.shared, part.place, part.branch): (stop, index)
            for stop, parts in enumerate(self.stops)
            for index, part in enumerate(parts)
        }


def make_route(passes: Iterable[Sequence[Job]]) -> Route:
    """Passes are jobs that go through the network together, one pass after the other."""
    shared: list[SharedRows] = []
    stops: list[tuple[StopPart, ...]] = []
    for jobs in passes:
        own = find_shared(jobs)
        shared += own
        for place in sorted({place for one in own for place in one.places}, key=rank_in(own)):
            there = [one for one in own if place in one.places]
            stops.append(tuple(StopPart(one, place, branch) for one in there for branch in one.branches))
    return Route(tuple(shared), tuple(stops))


def rank_in(shared: Sequence[SharedRows]) -> Callable[[int], int]:
    """Which in turn a pass reads each place. All activations of a pass have the same places."""
    return shared[0].activations.rank if shared else lambda place: place


def find_shared(jobs: Sequence[Job]) -> list[SharedRows]:
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        if needs_loading(job):
            groups.setdefault(sharing_key(job), []).append(job)
    return [SharedRows(tuple(group)) for group in groups.values()]


def sharing_key(job: Job) -> object:
    """A key that is equal for jobs that read the same rows. Nobody shares what a job keeps for itself."""
    assert job.activations is not None
    return job if job.own_steps else (job.activations.key, job.activations.slot(job.step))


def needs_loading(job: Job) -> bool:
    """Return whether the job reads rows in this step that are not ready on its device. A CPU unpacks rows ahead of
    their use; on a GPU the kernels that gather rows unpack them."""
    cache = job.activations
    is_packed = cache is not None and cache.is_packed and job.device.type == "cpu"
    return (is_packed or is_far(job)) and bool(places_of(job))


def is_far(job: Job) -> bool:
    """Return whether the job's activations are on another device."""
    return job.activations is not None and job.activations.rows[0].device != job.device


def places_of(job: Job, num_ahead: int = 0) -> tuple[int, ...]:
    """Places that a job reads in its present step, or `num_ahead` steps later with the same plan."""
    cache = job.activations
    step = job.step + num_ahead
    if cache is None or step >= job.num_steps or job.is_dense_at(step):
        return ()
    places = places_of_plan(job.plan, cache.run_lengths, len(cache.rows) > cache.num_blocks)
    return (*places, *range(cache.num_places, len(cache.rows))) if reads_convolutions(job, job.plan) else places


@lru_cache(maxsize=256)
def places_of_plan(plan: Plan, run_lengths: tuple[int, ...], keeps_outputs: bool) -> tuple[int, ...]:
    """Places that a plan reads: cached blocks, dense blocks after cached ones, where tokens come back, and the outputs
    kept after a run of blocks whose last one is cached."""
    places = []
    place = block = 0
    for length in run_lengths:
        before = False
        for cached in plan[block : block + length]:
            if cached or before:
                places.append(place)
            before, place = cached, place + 1
        if keeps_outputs:
            if before:
                places.append(place)
            place += 1
        block += length
    return tuple(places)

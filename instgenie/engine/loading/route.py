"""What a step reads of activations that have to be loaded, and in which order. Knows jobs and plans; moves nothing.

A route has a stop for each place of the pass that anybody reads there. Jobs of one template that are at the same step
share what they read. While the same jobs go on together, their route stays the same from step to step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from instgenie.cost.plan import Plan
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job


@dataclass(frozen=True, eq=False)
class Source:
    """A template at a step, for all jobs of a pass that are there."""

    jobs: tuple[Job, ...]

    @property
    def activations(self) -> Activations:
        activations = self.jobs[0].activations
        assert activations is not None
        return activations

    def kept(self, place: int, branch: int) -> Tensor:
        """At the present step of its jobs [2 or 1, tokens, width or bytes]"""
        return self.activations.kept(self.jobs[0].step, place, branch)

    @cached_property
    def places(self) -> frozenset[int]:
        return frozenset(place for job in self.jobs for place in places_of(job))

    @property
    def branches(self) -> range:
        """Those that are read, of those that are kept."""
        return range(min(max(len(job.branches) for job in self.jobs), self.activations.num_branches))

    @cached_property
    def _needed(self) -> dict[int, Tensor]:
        return {}

    def needed(self, num_tokens: int) -> Tensor:
        """Rows that any of the jobs reads, at a level of so many tokens [rows]; found once."""
        if num_tokens not in self._needed:
            outsides = [job.level(num_tokens).outside for job in self.jobs]
            self._needed[num_tokens] = outsides[0] if len(outsides) == 1 else union(outsides, num_tokens)
        return self._needed[num_tokens]


def union(indices: Sequence[Tensor], num_tokens: int) -> Tensor:
    chosen = torch.zeros(num_tokens, dtype=torch.bool, device=indices[0].device)
    return chosen.index_fill_(0, torch.cat(list(indices)), True).nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class Part:
    """One thing that is read at a stop."""

    source: Source
    place: int
    branch: int


@dataclass(frozen=True, eq=False)
class Route:
    sources: tuple[Source, ...]
    stops: tuple[tuple[Part, ...], ...]

    @cached_property
    def where(self) -> dict[tuple[Source, int, int], tuple[int, int]]:
        """Stop, and part of it, of whatever is read."""
        return {
            (part.source, part.place, part.branch): (stop, index)
            for stop, parts in enumerate(self.stops)
            for index, part in enumerate(parts)
        }


def make_route(passes: Iterable[Sequence[Job]]) -> Route:
    """Passes are jobs that go through the network together, one pass after the other."""
    sources: list[Source] = []
    stops: list[tuple[Part, ...]] = []
    for jobs in passes:
        own = find_sources(jobs)
        sources += own
        for place in sorted({place for source in own for place in source.places}):
            there = [source for source in own if place in source.places]
            stops.append(tuple(Part(source, place, branch) for source in there for branch in source.branches))
    return Route(tuple(sources), tuple(stops))


def find_sources(jobs: Sequence[Job]) -> list[Source]:
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        if needs_loading(job):
            groups.setdefault(shared_by(job), []).append(job)
    return [Source(tuple(group)) for group in groups.values()]


def shared_by(job: Job) -> object:
    """Equal for jobs that read the same rows. Of a lower strength, a job takes the last of the template's steps."""
    assert job.activations is not None
    key = job.activations.key
    return key, key.num_steps - job.num_steps + job.step


def needs_loading(job: Job) -> bool:
    """Whether it reads anything in this step that does not lie ready next to it."""
    return is_far(job) and bool(places_of(job))


def is_far(job: Job) -> bool:
    """Whether its activations are not in the memory of its device, or not as the model reads them."""
    cache = job.activations
    return cache is not None and (cache.is_packed or cache.rows[0].device != job.device)


def places_of(job: Job, num_ahead: int = 0) -> tuple[int, ...]:
    """What a job reads in its present step, or so many steps later with the same plan."""
    cache = job.activations
    if cache is None or not job.edit.dense_steps <= job.step + num_ahead < job.num_steps:
        return ()
    return places_of_plan(job.plan, cache.run_lengths, len(cache.rows) > cache.num_blocks)


@lru_cache(maxsize=256)
def places_of_plan(plan: Plan, units: tuple[int, ...], has_behind: bool) -> tuple[int, ...]:
    """A cached block reads, and so does a dense one behind a cached one, where tokens come back; and what is behind a
    unit of a UNet, where its last block is cached."""
    places = []
    place = block = 0
    for length in units:
        before = False
        for cached in plan[block : block + length]:
            if cached or before:
                places.append(place)
            before, place = cached, place + 1
        if has_behind:
            if before:
                places.append(place)
            place += 1
        block += length
    return tuple(places)

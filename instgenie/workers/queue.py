"""The queue of a worker: groups of jobs that wait to join the batch while the activations of their templates load."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from instgenie.cluster.wire import Denoise, Denoising, Frame, JobFailed, JobStep, Missing, TierFound, split_frames
from instgenie.cost.table import StepCosts
from instgenie.engine.pricing import priced
from instgenie.engine.register import make_activations, reuse
from instgenie.jobs.activations import Key
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.scheduling.scheduler import PricedJob, Split
from instgenie.workers.fetching import Fetching, FetchOutcome
from instgenie.workers.frames import read_job
from instgenie.workers.process import Line, failure
from instgenie.workers.templates import Templates


@dataclass(eq=False)
class TrackedJob:
    """A job, with the facts that reports on it need."""

    id: str
    attempt: int
    job: Job
    partials: tuple[int, ...]  # steps after which the client wants to see a picture
    fetching: Fetching | None = None  # activations that it waits for
    must_reuse: bool = False  # True if it may not run without activations that could be registered
    fails_dense: bool = False  # True if it may not run without activations at all
    key: Key | None = None  # of the activations it uses
    joined_at: float = 0.0
    trace: str = ""

    @property
    def progress(self) -> JobStep:
        return JobStep(self.id, self.attempt, self.job.step)


@dataclass(eq=False)
class JobGroup:
    """Waiting jobs that join together."""

    jobs: list[TrackedJob]

    @property
    def is_ready(self) -> bool:
        return not any(job.fetching for job in self.jobs)

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return [priced(tracked.job, costs) for tracked in self.jobs]


class WaitingQueue:
    def __init__(self, model: Model, templates: Templates, line: Line) -> None:
        self.model, self.templates, self.line = model, templates, line
        self.groups: deque[JobGroup] = deque()  # in the order of arrival

    def __iter__(self) -> Iterator[JobGroup]:
        return iter(self.groups)

    @property
    def num_jobs(self) -> int:
        return sum(group.num_jobs for group in self.groups)

    @property
    def num_ready(self) -> int:
        """Jobs of groups that may join."""
        return sum(group.num_jobs for group in self.groups if group.is_ready)

    @property
    def has_ready(self) -> bool:
        return any(group.is_ready for group in self.groups)

    def accept(self, message: Denoise, frames: Sequence[Frame]) -> None:
        """Add a group. Jobs that cannot be read fail and are left out."""
        pairs = zip(message.jobs, split_frames(frames, message.jobs), strict=True)
        if jobs := [tracked for tracked in (self.read(*pair) for pair in pairs) if tracked]:
            self.groups.append(JobGroup(jobs))

    def read(self, given: Denoising, frames: Sequence[Frame]) -> TrackedJob | None:
        try:
            job = read_job(given.job, frames, self.model.device)
            fetching = (
                self.templates.fetcher.fetch(self.templates.keys.find(given.template)) if given.template else None
            )
        except Exception as error:
            self.line.send(failure(given.id, given.attempt, error))
            return None
        partials = partial_steps(job.num_steps, given.num_partials)
        return TrackedJob(
            id=given.id,
            attempt=given.attempt,
            job=job,
            partials=partials,
            fetching=fetching,
            must_reuse=given.must_reuse,
            fails_dense=given.fails_dense,
            trace=given.trace,
        )

    def cancel(self, id: str) -> None:
        for group in self.groups:
            for tracked in [tracked for tracked in group.jobs if tracked.id == id]:
                group.jobs.remove(tracked)
                self.release(tracked)
        self.drop_empty()

    def split(self, split: Split) -> None:
        group = self.groups[split.position]
        self.groups[split.position] = JobGroup(group.jobs[split.num_first :])
        self.groups.insert(split.position, JobGroup(group.jobs[: split.num_first]))

    def take(self, positions: Sequence[int]) -> list[JobGroup]:
        """Remove groups from the queue."""
        taken = [self.groups[position] for position in positions]
        for group in taken:
            self.groups.remove(group)
        return taken

    def settle(self, running: Collection[TrackedJob]) -> None:
        """Give waiting jobs the activations that have arrived, or let them go on without."""
        for group in self.groups:
            for tracked in [tracked for tracked in group.jobs if tracked.fetching]:
                self.settle_one(tracked, group, running)
        self.drop_empty()

    def settle_one(self, tracked: TrackedJob, group: JobGroup, running: Collection[TrackedJob]) -> None:
        assert tracked.fetching
        key, outcome = tracked.fetching.key, tracked.fetching.outcome
        if outcome is FetchOutcome.LOADING or (outcome is FetchOutcome.REFUSED and self.will_have_room(running)):
            return
        tracked.fetching = None
        if outcome is FetchOutcome.ABSENT and tracked.must_reuse:
            self.line.send(Missing(tracked.id, tracked.attempt, self.templates.keys.id(key)))
            group.jobs.remove(tracked)
        elif isinstance(outcome, FetchOutcome) and tracked.fails_dense:
            self.line.send(JobFailed(tracked.id, tracked.attempt, "no_reuse", self.templates.why_not(outcome)))
            group.jobs.remove(tracked)
        elif isinstance(outcome, FetchOutcome):
            self.line.send(TierFound(tracked.id, tracked.attempt, None, self.templates.why_not(outcome)))
        else:
            tracked.job = reuse(tracked.job, make_activations(key, outcome.span, self.model))
            tracked.key = key
            self.templates.fetcher.pin(key)
            self.line.send(TierFound(tracked.id, tracked.attempt, self.templates.fetcher.where(tracked.id, outcome)))

    def will_have_room(self, running: Collection[TrackedJob]) -> bool:
        """Return whether memory will have room for further templates: some are in use now."""
        ready = (tracked for group in self.groups if group.is_ready for tracked in group.jobs)
        return any(tracked.key for tracked in (*running, *ready))

    def release(self, tracked: TrackedJob) -> None:
        """Unpin the activations of a job that leaves. Fetches that found no room try again."""
        if tracked.key is None:
            return
        self.templates.fetcher.unpin(tracked.key)
        for group in self.groups:
            for other in group.jobs:
                if other.fetching and other.fetching.outcome is FetchOutcome.REFUSED:
                    self.templates.fetcher.retry(other.fetching)

    def drop_empty(self) -> None:
        self.groups = deque(group for group in self.groups if group.jobs)


def partial_steps(num_steps: int, num_partials: int) -> tuple[int, ...]:
    """The steps after which to show a picture: evenly spread, without the last step."""
    steps = (num_steps * (index + 1) // (num_partials + 1) for index in range(num_partials))
    return tuple(dict.fromkeys(step for step in steps if 0 < step < num_steps))

"""The queue of a worker: groups of jobs that wait to join the batch while the activations of their templates load."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from instgenie.cache.store import Found
from instgenie.cluster.orders import GuidanceFacts
from instgenie.cluster.wire import (
    Denoise,
    Denoising,
    Fetch,
    Frame,
    JobFailed,
    JobStep,
    Missing,
    TierFound,
    split_frames,
)
from instgenie.cost.table import StepCosts
from instgenie.engine.pricing import priced
from instgenie.engine.register import make_activations, reuse
from instgenie.jobs.activations import Key
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.scheduling.policy import MAX_OVERTAKEN, Policy, Situation
from instgenie.scheduling.scheduler import Split
from instgenie.scheduling.terms import NO_TERMS, PricedJob, Terms
from instgenie.workers.fetching import Fetching, FetchOutcome
from instgenie.workers.frames import read_job
from instgenie.workers.line import Line
from instgenie.workers.lora_desk import LoraWait
from instgenie.workers.own_room import OwnRoom
from instgenie.workers.process import failure
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
    may_own: bool = False  # True if without activations it reads what its own dense steps leave behind
    fails_dense: bool = False  # True if it may not run without activations at all
    activations: Key | None = None  # those it uses
    found: TierFound | None = None  # what was said about its activations
    joined_at: float = 0.0
    run_seconds: float = 0.0  # in the batch, before it was preempted
    terms: Terms = NO_TERMS  # its deadline is on the clock `time.monotonic` of this process
    arrived: int = 0  # in the order of arrival
    num_own_overtaken: int = 0  # younger jobs of its tenant that joined before it
    is_let_go: bool = False  # True if its activations were unpinned while it waited
    is_preempted: bool = False  # True while it waits after it was in the batch
    trace: str = ""
    request_id: str = ""
    key: str = ""  # idempotency key
    num_control_retries: int = 0  # steps that were repeated because a process of ControlNets had died
    guidance: GuidanceFacts | None = None  # None: it was never split
    loras: LoraWait | None = None  # None: it has none
    followers: list[Denoising] = field(default_factory=list)  # jobs with the same key, which get what it gets

    @property
    def askers(self) -> "list[TrackedJob | Denoising]":
        """The jobs that reports on it go to."""
        return [self, *self.followers]

    @property
    def is_refused(self) -> bool:
        """True while memory has no room for the activations that it waits for."""
        return self.fetching is not None and self.fetching.outcome is FetchOutcome.REFUSED

    @property
    def progress(self) -> list[JobStep]:
        return [JobStep(asker.id, asker.attempt, self.job.step) for asker in self.askers]

    def priced(self, costs: StepCosts) -> PricedJob:
        return priced(self.job, costs, self.terms, self.num_own_overtaken)


@dataclass(eq=False)
class JobGroup:
    """Waiting jobs that join together."""

    jobs: list[TrackedJob]
    num_overtaken: int = 0  # younger jobs that joined before it
    needs_room: bool = False  # True if it has waited too long for room in memory
    has_own_room: bool = True  # False while there is no room for what its jobs keep for themselves

    @property
    def is_preempted(self) -> bool:
        return self.jobs[0].is_preempted

    @property
    def is_fetching(self) -> bool:
        return any(job.fetching for job in self.jobs)

    @property
    def is_ready(self) -> bool:
        return self.has_own_room and not self.is_fetching

    @property
    def is_overdue(self) -> bool:
        return self.num_overtaken >= MAX_OVERTAKEN

    @property
    def holds_others_back(self) -> bool:
        """True if younger groups get no activations before it."""
        return self.needs_room and not self.is_ready

    def note_refusal(self) -> None:
        """Note whether memory has refused it for too long."""
        self.needs_room |= self.is_overdue and any(job.is_refused for job in self.jobs)

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return [tracked.priced(costs) for tracked in self.jobs]


class WaitingQueue:
    def __init__(self, model: Model, templates: Templates, line: Line, own_room: OwnRoom | None = None) -> None:
        self.model, self.templates, self.line = model, templates, line
        self.own_room = own_room or OwnRoom(model, sys.maxsize)
        self.groups: deque[JobGroup] = deque()  # in the order of arrival, or that of a policy
        self.num_accepted = 0
        self.is_holding_back = False  # True if the jobs that come now get no activations yet
        self.on_leave: Callable[[TrackedJob], None] = lambda tracked: None  # called when a job ends, however it does

    def __iter__(self) -> Iterator[JobGroup]:
        return iter(self.groups)

    @property
    def jobs(self) -> Iterator[TrackedJob]:
        return (tracked for group in self.groups for tracked in group.jobs)

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

    def accept(self, message: Denoise, frames: Sequence[Frame]) -> Sequence[TrackedJob]:
        """Add a group, and return its jobs. Jobs that cannot be read fail and are left out."""
        pairs = zip(message.jobs, split_frames(frames, message.jobs), strict=True)
        jobs = [tracked for tracked in (self.read(*pair) for pair in pairs) if tracked]
        if jobs:
            self.groups.append(JobGroup(jobs))
        return jobs

    def read(self, given: Denoising, frames: Sequence[Frame]) -> TrackedJob | None:
        try:
            job = read_job(given.job, frames, self.model.device)
            fetching = self.fetch(self.templates.find(given.template, given.peers)) if given.template else None
            job = self.own_room.reuse_own(job) if given.may_own and not given.template else job
        except Exception as error:
            self.line.send(failure(given, error))
            return None
        partials = partial_steps(job.num_steps, given.num_partials)
        self.num_accepted += 1
        return TrackedJob(
            id=given.id,
            attempt=given.attempt,
            job=job,
            partials=partials,
            fetching=fetching,
            must_reuse=given.must_reuse,
            may_own=given.may_own,
            fails_dense=given.fails_dense,
            trace=given.trace,
            request_id=given.request_id,
            key=given.key,
            terms=terms_of(given),
            arrived=self.num_accepted,
            num_own_overtaken=given.num_overtaken,
        )

    def fetch(self, key: Key) -> Fetching:
        if not self.is_holding_back:
            return self.templates.fetcher.fetch(key)
        fetching = Fetching(key)
        fetching.put_off()
        return fetching

    def announce(self, message: Fetch) -> None:
        """Start to load for a job that will come, unless an older job needs the room."""
        if not self.is_holding_back:
            self.templates.fetcher.announce(message.id, self.templates.find(message.template, message.peers))

    def cancel(self, id: str) -> None:
        for group in self.groups:
            for tracked in [tracked for tracked in group.jobs if tracked.id == id]:
                group.jobs.remove(tracked)
                self.release(tracked)
        self.drop_empty()

    def sort(self, policy: Policy, situation: Situation) -> None:
        """Bring those to the front that go first."""
        if len(self.groups) > 1:
            self.groups = deque(policy.order(self.groups, situation))

    def give_back(self, tracked: TrackedJob) -> None:
        """Let a job wait that left the batch. It keeps its activations, until another group needs the room."""
        tracked.is_preempted = True
        self.groups.append(JobGroup([tracked]))

    def split(self, split: Split) -> None:
        group = self.groups[split.position]
        self.groups[split.position] = replace(group, jobs=group.jobs[split.num_first :])
        self.groups.insert(split.position, replace(group, jobs=group.jobs[: split.num_first]))

    def take(self, positions: Sequence[int]) -> list[JobGroup]:
        """Remove groups from the queue, and count whom they overtake; jobs that go on have been counted before."""
        taken = [self.groups[position] for position in positions]
        joining = [tracked for group in taken for tracked in group.jobs if not tracked.job.step]
        for group in self.groups:
            if group not in taken:
                younger = [one for one in joining if one.arrived > group.jobs[-1].arrived]
                group.num_overtaken += len(younger)
                for tracked in group.jobs:
                    tracked.num_own_overtaken += sum(one.terms.tenant == tracked.terms.tenant for one in younger)
        self.groups = deque(group for group in self.groups if group not in taken)
        return taken

    def settle(self) -> None:
        """Give waiting jobs the activations that have arrived, or let them go on without. A group that has waited too
        long for room in memory holds back all younger ones, so that those which use the room come to their end."""
        self.is_holding_back = False
        for group in self.groups:
            for tracked in [tracked for tracked in group.jobs if tracked.fetching]:
                if self.is_holding_back:
                    self.hold_back(tracked)
                else:
                    self.settle_one(tracked, group)
            group.note_refusal()
            self.is_holding_back |= group.holds_others_back
        self.groups = deque(part for group in self.groups for part in cut_off_refused(group))
        if self.is_holding_back:
            self.let_go_preempted()
        self.drop_empty()

    def let_go_preempted(self) -> None:
        """Unpin the templates of preempted jobs, which fetch them again before they go on. What a job's own dense steps
        left stays: without it the job would end with another picture."""
        for tracked in [tracked for group in self.groups for tracked in group.jobs if tracked.is_preempted]:
            if key := self.unpin(tracked):
                tracked.fetching, tracked.is_let_go = Fetching(key), True
                tracked.fetching.put_off()

    def hold_back(self, tracked: TrackedJob) -> None:
        assert tracked.fetching
        if isinstance(tracked.fetching.outcome, Found):
            self.templates.fetcher.drop(tracked.fetching)

    def settle_one(self, tracked: TrackedJob, group: JobGroup) -> None:
        assert tracked.fetching
        key, outcome = tracked.fetching.key, tracked.fetching.outcome
        if outcome is FetchOutcome.LOADING:
            return
        if outcome is FetchOutcome.REFUSED and self.may_find_room(tracked.fetching):
            return
        tracked.fetching = None
        is_lost = outcome is FetchOutcome.ABSENT and tracked.must_reuse
        if is_lost or (tracked.is_let_go and isinstance(outcome, FetchOutcome)):
            self.tell(tracked, lambda id, attempt: Missing(id, attempt, self.templates.keys.id(key)))
            group.jobs.remove(tracked)
        elif isinstance(outcome, FetchOutcome) and tracked.fails_dense:
            why = self.templates.why_not(outcome)
            self.tell(tracked, lambda id, attempt: JobFailed(id, attempt, "no_reuse", why))
            group.jobs.remove(tracked)
        elif isinstance(outcome, FetchOutcome):
            tracked.job = self.own_room.reuse_own(tracked.job) if tracked.may_own else tracked.job
            why = self.templates.why_not(outcome)
            self.tell(tracked, lambda id, attempt: TierFound(id, attempt, None, why))
        else:
            tracked.job = reuse(tracked.job, make_activations(key, outcome.span, self.model))
            tracked.activations = key
            self.templates.fetcher.pin(key)
            tier = self.templates.fetcher.where(tracked.id, outcome)
            self.tell(tracked, lambda id, attempt: TierFound(id, attempt, tier))

    def tell(self, tracked: TrackedJob, make: Callable[[str, int], TierFound | Missing | JobFailed]) -> None:
        """Tell all who asked for a job what became of it."""
        for asker in tracked.askers:
            message = make(asker.id, asker.attempt)
            self.line.send(message)
            tracked.found = message if isinstance(message, TierFound) else None
        if tracked.found is None:
            self.on_leave(tracked)

    def grant_own_room(self, running: Sequence[Job]) -> None:
        """Let groups join for which there is room beside the running jobs. A group that waits for activations takes no
        room: others, which have theirs, would wait for it and keep it from its own."""
        self.groups = deque(part for group in self.groups for part in cut(group, self.own_room))
        preempted = [tracked.job for group in self.groups if group.is_preempted for tracked in group.jobs]
        waiting = ([] if group.is_fetching else [tracked.job for tracked in group.jobs] for group in self.groups)
        granting = self.own_room.grant(waiting, running, preempted)
        for group, granted in zip(self.groups, granting, strict=True):
            group.has_own_room = granted

    def may_find_room(self, fetching: Fetching) -> bool:
        """Return whether a refused fetch may still succeed: it is tried again, or others use the room for a while."""
        fetches = (job.fetching for group in self.groups for job in group.jobs if job.fetching)
        is_loading = any(other.outcome is FetchOutcome.LOADING or isinstance(other.outcome, Found) for other in fetches)
        return self.templates.fetcher.retry_if_room(fetching) or is_loading

    def release(self, tracked: TrackedJob) -> None:
        """Unpin the activations of a job that leaves."""
        self.unpin(tracked)
        self.on_leave(tracked)

    def unpin(self, tracked: TrackedJob) -> Key | None:
        """Let go of the activations that a job uses, if it uses any. Returns their key."""
        key, tracked.activations = tracked.activations, None
        if key is not None:
            self.templates.fetcher.unpin(key)
        return key

    def drop_empty(self) -> None:
        self.groups = deque(group for group in self.groups if group.jobs)


def cut_off_refused(group: JobGroup) -> list[JobGroup]:
    """Jobs that have their activations do not wait for those of their group whose activations find no room: the room
    may be their own."""
    refused = [tracked for tracked in group.jobs if tracked.is_refused]
    if not refused or not any(tracked.activations for tracked in group.jobs):
        return [group]
    others = [tracked for tracked in group.jobs if tracked not in refused]
    return [replace(group, jobs=jobs) for jobs in (others, refused)]


def cut(group: JobGroup, room: OwnRoom) -> list[JobGroup]:
    """The parts of a group that find room together. A group is whole while it waits for activations: what its jobs keep
    depends on them."""
    if group.num_jobs == 1 or group.is_fetching:
        return [group]
    lengths = list(room.cut([tracked.job for tracked in group.jobs]))
    if len(lengths) == 1:
        return [group]
    ends = accumulate(lengths)
    return [replace(group, jobs=group.jobs[end - num : end]) for num, end in zip(lengths, ends, strict=True)]


def terms_of(given: Denoising) -> Terms:
    """Its terms, with the deadline on the clock of this process."""
    return Terms(time.monotonic() + given.seconds_left, given.priority, given.tenant, given.number)


def partial_steps(num_steps: int, num_partials: int) -> tuple[int, ...]:
    """The steps after which to show a picture: evenly spread, without the last step."""
    steps = (num_steps * (index + 1) // (num_partials + 1) for index in range(num_partials))
    return tuple(dict.fromkeys(step for step in steps if 0 < step < num_steps))

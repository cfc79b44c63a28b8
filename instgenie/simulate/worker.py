"""A simulated worker: prepares edits one by one, takes steps of a batch, finishes one by one. Knows its own load.

As in a real one, jobs join and leave between steps, who joins is for `admission` to say, and a job whose template is on
its way into memory lets others go first. A worker of one process prepares and finishes between steps if it is naive,
between batches if it is static.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from instgenie.cost.table import Price
from instgenie.scheduling.admission import Asking, num_joining
from instgenie.scheduling.names import ONE_PROCESS, Batching
from instgenie.scheduling.router import Load, Work
from instgenie.simulate.clock import Clock
from instgenie.simulate.service import Service, Sums
from instgenie.types import TierName


@dataclass(eq=False, slots=True)
class Job:
    """An edit in the simulation, and when what happened to it."""

    id: str
    arrived: float
    work: Work
    num_dense_steps: int = 0  # leading steps that compute every token
    is_cached: bool = True  # whether its template's activations are to be had
    there_at: float = 0.0  # when they are in memory
    worker: int = -1
    step: int = 0
    prepared: float = 0.0
    joined: float = 0.0
    denoised: float = 0.0
    finished: float = 0.0
    num_finished: int = 0

    @property
    def latency(self) -> float:
        return self.finished - self.arrived

    @property
    def is_dense(self) -> bool:
        """At its present step."""
        return not self.is_cached or self.step < self.num_dense_steps


@dataclass
class Memory:
    """The templates a worker has at hand, those used least recently go; a missing one takes a while to fetch."""

    max_templates: int
    fetch: float  # seconds
    tiers: dict[str, TierName] = field(default_factory=dict)  # where each is, as the router knows it
    there_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def use(self, template: str, now: float) -> float:
        """When it is there."""
        self.there_at[template] = max(self.there_at.get(template, now + self.fetch), now)
        self.there_at.move_to_end(template)
        self.tiers[template] = "host"
        if len(self.there_at) > self.max_templates:
            gone, _ = self.there_at.popitem(last=False)
            self.tiers[gone] = "disk"
        return self.there_at[template]


@dataclass(eq=False)
class Worker:
    load: Load
    service: Service
    clock: Clock
    on_finished: Callable[[Job], None]
    batching: Batching = "continuous"
    memory: Memory | None = None
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    to_prepare: deque[Job] = field(default_factory=deque)  # of a worker of one process
    to_finish: deque[Job] = field(default_factory=deque)  # of a worker of one process
    is_busy: bool = False
    is_other: bool = True  # whether the coming step is another than the last: others run, or some no longer dense
    seconds: float = 0.0  # of a step
    predicted: float = 0.0  # by the router's costs
    can_prepare_at: float = 0.0
    can_finish_at: float = 0.0

    def accept(self, job: Job) -> None:
        job.worker = self.load.worker
        self.load.add(job.id, job.work.num_steps, self.load.tokens_of(job.work), self.load.price_of(job.work))
        if self.memory and job.work.template:
            job.there_at = self.memory.use(job.work.template, self.clock.now)
        if self.batching in ONE_PROCESS:
            self.to_prepare.append(job)
            self.wake()
            return
        self.can_prepare_at = max(self.can_prepare_at, self.clock.now) + self.service.chores.prepare
        self.clock.at(max(self.can_prepare_at, job.there_at), self.prepared, job)

    def prepared(self, job: Job) -> None:
        job.prepared = self.clock.now
        self.waiting.append(job)
        self.wake()

    def wake(self) -> None:
        if not self.is_busy:
            self.go_on(None)

    def go_on(self, _: None) -> None:
        """At a step's end, or out of idleness: take in, join, take a step."""
        self.is_busy = True
        if seconds := self.do_chores():
            self.clock.at(self.clock.now + seconds, self.go_on, None)
            return
        self.join()
        if not self.running:
            self.is_busy = False
            return
        if self.is_other:
            self.is_other = False
            self.seconds = self.service.step(sums_of(self.running))
            self.predicted = self.load.costs.step(self.price_of(job) for job in self.running)
        self.clock.at(self.clock.now + self.seconds, self.stepped, None)

    def price_of(self, job: Job) -> Price:
        """Of its present step, of what is in memory."""
        return self.load.costs.price(job.work.num_tokens, job.work.num_masked_tokens, None if job.is_dense else "host")

    def do_chores(self) -> float:
        """What a worker of one process does before it can take a step; the seconds it takes."""
        if self.batching == "static" and self.running:
            return 0.0
        chores, seconds = self.service.chores, 0.0
        while self.to_finish:
            job = self.to_finish.popleft()
            seconds += chores.finish_seconds(job.work.num_masked_tokens)
            self.end(job, self.clock.now + seconds)
        while self.to_prepare and (self.batching == "naive" or len(self.waiting) < self.load.max_batch_size):
            job = self.to_prepare.popleft()
            seconds += chores.prepare
            job.prepared = self.clock.now + seconds
            if job.there_at <= job.prepared:
                self.waiting.append(job)
            else:
                self.clock.at(job.there_at, self.prepared, job)
        return seconds

    def join(self) -> None:
        if not self.waiting:
            return
        groups = ([self.ask(job)] for job in self.waiting)
        inside = [self.ask(job) for job in self.running]
        num_waiting, max_jobs = len(self.waiting), self.load.max_batch_size
        for _ in range(num_joining(groups, num_waiting, inside, max_jobs, self.batching, self.load.costs)):
            job = self.waiting.popleft()
            job.joined = self.clock.now
            self.running.append(job)
            self.is_other = True

    def ask(self, job: Job) -> Asking:
        """With the mean price of what is left."""
        work, num_left = job.work, job.work.num_steps - job.step
        num_dense = max(job.num_dense_steps - job.step, 0) if job.is_cached else num_left
        price = self.load.costs.mean_price(work.num_tokens, work.num_masked_tokens, "host", num_dense, num_left)
        return Asking(price, num_left)

    def stepped(self, _: None) -> None:
        self.load.pace.measure(self.predicted, self.seconds)
        step_load = self.load.step
        done = []
        for job in self.running:
            job.step += 1
            step_load(job.id)
            if job.step == job.work.num_steps:
                done.append(job)
            elif job.step == job.num_dense_steps:
                self.is_other = True
        for job in done:
            self.leave(job)
        self.go_on(None)

    def leave(self, job: Job) -> None:
        self.is_other = True
        self.running.remove(job)
        self.load.hand_over(job.id)
        job.denoised = self.clock.now
        if self.batching in ONE_PROCESS:
            self.to_finish.append(job)
            return
        chores, num_masked = self.service.chores, job.work.num_masked_tokens
        start = max(self.can_finish_at, self.clock.now)
        self.can_finish_at = start + chores.period(num_masked)
        self.clock.at(start + chores.finish_seconds(num_masked), self.finished, job)

    def finished(self, job: Job) -> None:
        self.end(job, self.clock.now)

    def end(self, job: Job, at: float) -> None:
        self.load.remove(job.id)
        self.load.measure_chore("finish", self.service.chores.period(job.work.num_masked_tokens))
        job.finished = at
        job.num_finished += 1
        self.on_finished(job)


def sums_of(jobs: list[Job]) -> Sums:
    first = jobs[0].work.num_tokens
    num_cached = num_masked = num_dense = 0
    for job in jobs:
        if job.work.num_tokens != first:
            sizes = sorted({job.work.num_tokens for job in jobs})
            return tuple(sums_of([job for job in jobs if job.work.num_tokens == size])[0] for size in sizes)
        if job.is_dense:
            num_dense += 1
        else:
            num_cached += 1
            num_masked += job.work.num_masked_tokens
    return ((first, num_cached, num_masked, num_dense),)

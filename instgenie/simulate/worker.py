"""A simulated worker: it prepares edits one by one, takes steps of a batch, and finishes edits one by one.

As in a real worker, jobs join and leave between steps, the scheduler decides which, and a job whose template is still
being fetched lets others go first. A worker of one process prepares and finishes between steps if it is naive, and
between batches if it is static.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from instgenie.cost.table import Price, StepCosts
from instgenie.scheduling.names import ONE_PROCESS, Batching
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.policy import Policy, Situation
from instgenie.scheduling.router import Work, WorkerLoad
from instgenie.scheduling.terms import NO_DEADLINE, PricedJob, Terms
from instgenie.simulate.clock import Clock
from instgenie.simulate.service import Service, Sums
from instgenie.types import TierName


@dataclass(eq=False, slots=True)
class SimulatedJob:
    """An edit in the simulation and the times of its stages. It waits as a group of one job."""

    id: str
    arrived: float
    work: Work
    num_dense_steps: int = 0  # leading steps that compute every token
    own_steps: tuple[int, ...] = ()  # dense steps without a template, whose activations the others read; none: all are
    is_cached: bool = True  # True if its template has activations
    fetched_at: float = 0.0  # time at which they are in memory
    worker: int = -1
    front: int = 0  # the one that it came to
    step: int = 0
    prepared: float = 0.0
    joined: float = 0.0
    denoised: float = 0.0
    finished: float = 0.0
    num_finished: int = 0
    deadline: float = NO_DEADLINE
    due: float = NO_DEADLINE  # time at which its last step should be taken
    tenant: str = ""
    number: int = 0
    num_own_overtaken: int = 0
    num_preemptions: int = 0
    _priced: PricedJob | None = None  # at its current step

    @property
    def terms(self) -> Terms:
        return Terms(self.due, 0, self.tenant, self.number)

    @property
    def latency(self) -> float:
        return self.finished - self.arrived

    @property
    def is_dense(self) -> bool:
        """True if its current step computes every token."""
        if self.is_cached:
            return self.step < self.num_dense_steps
        return not self.own_steps or self.step in self.own_steps

    @property
    def is_ready(self) -> bool:
        """Always true: a job enters the queue when its activations are in memory."""
        return True

    @property
    def is_overdue(self) -> bool:
        """Always false: simulated jobs are short."""
        return False

    @property
    def num_jobs(self) -> int:
        return 1

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        num_left = self.work.num_steps - self.step
        if self._priced and self._priced.num_steps == num_left:
            if self._priced.num_overtaken != self.num_own_overtaken:
                self._priced = self._priced._replace(num_overtaken=self.num_own_overtaken)
            return [self._priced]
        num_dense = max(self.num_dense_steps - self.step, 0) if self.is_cached else num_left
        if not self.is_cached and self.own_steps:
            num_dense = sum(step >= self.step for step in self.own_steps)
        price = costs.mean_price(self.work.num_tokens, self.work.num_masked_tokens, "host", num_dense, num_left)
        price = costs.guided(price, self.work.num_tokens, self.work.guided)
        self._priced = PricedJob(price, num_left, self.terms, self.num_own_overtaken, self.step)
        return [self._priced]


class Memory(Protocol):
    def use(self, template: str, now: float) -> float:
        """Return the time at which the template is in memory."""


@dataclass
class TemplateMemory:
    """The templates in a worker's memory. Those used least recently are evicted; a missing one has to be fetched."""

    max_templates: int
    fetch: float  # seconds
    tiers: dict[str, TierName] = field(default_factory=dict)  # tier of each template, as the router sees it
    fetched_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def use(self, template: str, now: float) -> float:
        """Return the time at which the template is in memory."""
        self.fetched_at[template] = max(self.fetched_at.get(template, now + self.fetch), now)
        self.fetched_at.move_to_end(template)
        self.tiers[template] = "host"
        if len(self.fetched_at) > self.max_templates:
            evicted, _ = self.fetched_at.popitem(last=False)
            self.tiers[evicted] = "disk"
        return self.fetched_at[template]


@dataclass(eq=False)
class SimulatedWorker:
    load: WorkerLoad
    service: Service
    clock: Clock
    on_finished: Callable[[SimulatedJob], None]
    batching: Batching = "continuous"
    memory: Memory | None = None
    policy: Policy = field(default_factory=lambda: make_policy("fcfs"))
    num_accepted: int = 0
    waiting: deque[SimulatedJob] = field(default_factory=deque)
    running: list[SimulatedJob] = field(default_factory=list)
    to_prepare: deque[SimulatedJob] = field(default_factory=deque)  # used by workers of one process
    to_finish: deque[SimulatedJob] = field(default_factory=deque)  # used by workers of one process
    is_busy: bool = False
    has_changed: bool = True  # True if the next step differs from the last: in its jobs, or in which of them are dense
    seconds: float = 0.0  # per step
    predicted: float = 0.0  # seconds per step, by the router's costs
    can_prepare_at: float = 0.0
    can_finish_at: float = 0.0
    controls_at: dict[str, float] = field(default_factory=dict)  # times at which its ControlNets are there, by version

    def accept(self, job: SimulatedJob) -> None:
        job.worker = self.load.worker
        self.num_accepted += 1
        job.number = self.num_accepted
        job.due = job.deadline - self.service.side.finish_seconds(job.work.num_masked_tokens)
        self.load.add(job.id, job.work.num_steps, self.load.tokens_of(job.work), self.load.price_of(job.work))
        if self.memory and job.work.template:
            job.fetched_at = self.memory.use(job.work.template, self.clock.now)
        if job.work.controls:
            self.load_controls(job)
        if self.batching in ONE_PROCESS:
            self.to_prepare.append(job)
            self.wake()
            return
        self.can_prepare_at = max(self.can_prepare_at, self.clock.now) + self.service.side.prepare
        self.clock.at(max(self.can_prepare_at, job.fetched_at), self.prepared, job)

    def load_controls(self, job: SimulatedJob) -> None:
        """Let a job wait for its ControlNets, which stay in memory from then on."""
        holdings = self.load.controls
        at = self.clock.now + holdings.load_seconds(job.work.controls)  # one after the other
        for version, _ in job.work.controls:
            if version not in holdings.versions:
                self.controls_at[version] = at
            job.fetched_at = max(job.fetched_at, self.controls_at.get(version, 0.0))
        holdings.expect(job.work.controls)

    def prepared(self, job: SimulatedJob) -> None:
        job.prepared = self.clock.now
        self.waiting.append(job)
        self.wake()

    def wake(self) -> None:
        if not self.is_busy:
            self.go_on(None)

    def go_on(self, _: None) -> None:
        """Go on after a step, or after being idle: do side work, let jobs join, take a step."""
        self.is_busy = True
        if seconds := self.do_side_work():
            self.clock.at(self.clock.now + seconds, self.go_on, None)
            return
        self.join()
        if not self.running:
            self.is_busy = False
            return
        if self.has_changed:
            self.has_changed = False
            self.seconds = self.service.step(sums_of(self.running))
            self.seconds += self.service.side.between + sum(self.control_seconds(job) for job in self.running)
            self.predicted = self.load.costs.step_seconds(self.price_of(job) for job in self.running)
        self.clock.at(self.clock.now + self.seconds, self.stepped, None)

    def price_of(self, job: SimulatedJob) -> Price:
        """Price of its current step, with activations in main memory."""
        price = self.price_without(job)
        return price._replace(compute=price.compute + self.control_seconds(job))

    def price_without(self, job: SimulatedJob) -> Price:
        """The same without ControlNets."""
        return self.load.costs.price(job.work.num_tokens, job.work.num_masked_tokens, None if job.is_dense else "host")

    def control_seconds(self, job: SimulatedJob) -> float:
        """Seconds that its ControlNets add to a step, in the mean over its steps."""
        if not job.work.guided:
            return 0.0
        return self.load.costs.control_seconds(self.price_without(job), job.work.num_tokens, job.work.guided)

    def do_side_work(self) -> float:
        """Finish and prepare edits, in a worker of one process, before the next step. Returns the seconds it takes."""
        if self.batching == "static" and self.running:
            return 0.0
        side, seconds = self.service.side, 0.0
        while self.to_finish:
            job = self.to_finish.popleft()
            seconds += side.finish_seconds(job.work.num_masked_tokens)
            self.end(job, self.clock.now + seconds)
        while self.to_prepare and (self.batching == "naive" or len(self.waiting) < self.load.max_batch_size):
            job = self.to_prepare.popleft()
            seconds += side.prepare
            job.prepared = self.clock.now + seconds
            if job.fetched_at <= job.prepared:
                self.waiting.append(job)
            else:
                self.clock.at(job.fetched_at, self.prepared, job)
        return seconds

    def join(self) -> None:
        if not self.waiting:
            return
        running = [priced for job in self.running for priced in job.priced(self.load.costs)]
        num_waiting, max_jobs = len(self.waiting), self.load.max_batch_size
        policy, costs, now = self.policy, self.load.costs, self.clock.now
        situation = Situation(running, max_jobs, costs, now)
        policy.meet(job.tenant for job in (*self.waiting, *self.running))
        if num_waiting > 1 and type(policy) is not Policy:
            self.waiting = deque(policy.order(self.waiting, situation))
        decision = policy.decide(self.waiting, num_waiting, situation)
        joining = [self.waiting[position] for position in decision.joining]
        for job in [self.running[position] for position in decision.leaving]:
            self.running.remove(job)
            self.waiting.append(job)
            job.num_preemptions += 1
        for job in self.waiting if len(joining) < num_waiting else ():
            if job not in joining:
                job.num_own_overtaken += sum(
                    other.number > job.number and other.tenant == job.tenant and not other.step for other in joining
                )
        for job in joining:
            self.waiting.remove(job)
            job.joined = job.joined or self.clock.now
            self.running.append(job)
            self.has_changed = True

    def stepped(self, _: None) -> None:
        self.load.pace.measure(self.predicted, self.seconds)
        self.policy.charge([job.tenant for job in self.running], self.seconds)
        step_load = self.load.step
        done = []
        for job in self.running:
            job.step += 1
            step_load(job.id)
            if job.step == job.work.num_steps:
                done.append(job)
            elif job.step == job.num_dense_steps or job.step in job.own_steps or job.step - 1 in job.own_steps:
                self.has_changed = True
        for job in done:
            self.leave(job)
        self.go_on(None)

    def leave(self, job: SimulatedJob) -> None:
        self.has_changed = True
        self.running.remove(job)
        self.load.hand_over(job.id)
        job.denoised = self.clock.now
        if self.batching in ONE_PROCESS:
            self.to_finish.append(job)
            return
        side, num_masked = self.service.side, job.work.num_masked_tokens
        start = max(self.can_finish_at, self.clock.now)
        self.can_finish_at = start + side.period(num_masked)
        self.clock.at(start + side.finish_seconds(num_masked), self.finished, job)

    def finished(self, job: SimulatedJob) -> None:
        self.end(job, self.clock.now)

    def end(self, job: SimulatedJob, at: float) -> None:
        self.load.remove(job.id)
        self.load.measure_side_stage("finish", self.service.side.period(job.work.num_masked_tokens))
        job.finished = at
        job.num_finished += 1
        self.on_finished(job)


def sums_of(jobs: list[SimulatedJob]) -> Sums:
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

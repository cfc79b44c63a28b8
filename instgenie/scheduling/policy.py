"""The policy of a worker: who goes first, who joins the batch, and who leaves it for another. The step loop, the
cluster's queues, the router and the simulator ask the same object. It is arithmetic: no clock, no torch, no socket.

    fcfs        in the order of arrival
    edf         the earliest deadline first
    slack       PatchedServe's Algorithm 1: the least slack first; a job joins if the running ones still meet their
                deadlines and the batch gains enough; those that cannot meet their own any more come last
    preemptive  the least slack first within fair shares and priorities; running jobs with slack leave between two steps
                for one without; nobody is overtaken without end

The slack of a job is the time that is left until its deadline beyond what its remaining steps take.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from instgenie.cost.table import StepCosts
from instgenie.scheduling.names import Batching, Scheduling
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.scheduler import (
    SCHEDULERS,
    Decision,
    FirstCome,
    Scheduler,
    Split,
    WaitingGroup,
    pays,
)
from instgenie.scheduling.shares import Shares
from instgenie.scheduling.terms import PricedJob, Standing, Terms

MAX_OVERTAKEN = 16  # younger jobs of its tenant that go before another one; then it is overdue: all others go after it
MAX_OVERTAKEN_LATE = 64  # the same for one that misses its deadline anyway
BENEFIT = 1.0  # slack: jobs per second of the larger batch, as a multiple of those before, from which on it grows

Rank = tuple[float, ...]  # lower goes first


class RankedGroup(WaitingGroup, Protocol):
    @property
    def terms(self) -> Terms:
        """Those of each of its jobs."""

    @property
    def num_own_overtaken(self) -> int:
        """Younger jobs of its tenant that joined before it."""


Group = TypeVar("Group", bound=RankedGroup)


class Situation(NamedTuple):
    """What a decision depends on, besides the queue."""

    running: Sequence[PricedJob]
    max_jobs: int
    costs: StepCosts
    now: float


@dataclass
class Policy:
    """First come, first served. The other policies derive from it."""

    scheduler: Scheduler
    pace: Pace = field(default_factory=Pace)  # of the worker; measured steps correct it
    shares: Shares = field(default_factory=Shares)

    def rank(self, claim: Standing, now: float) -> Rank:
        return (claim.terms.number,)

    def meet(self, tenants: Iterable[str]) -> None:
        """Note who has work now."""

    def charge(self, tenants: Iterable[str], seconds: float) -> None:
        """Note a step of jobs of these tenants, which are named once per job."""

    def order(self, waiting: Iterable[Group], costs: StepCosts, now: float) -> list[Group]:
        """The queue, those that go first in front."""
        return sorted(waiting, key=lambda group: self.rank(self.claim_of(group, costs), now))

    def claim_of(self, group: RankedGroup, costs: StepCosts) -> Standing:
        return Standing(group.terms, self.seconds(group.priced(costs), costs), group.num_own_overtaken)

    def decide(self, waiting: Sequence[RankedGroup], num_ready: int, situation: Situation) -> Decision:
        """Decide who joins and who leaves. `waiting` is in the order of `order`."""
        running, max_jobs, costs, _ = situation
        return self.scheduler.decide(waiting, num_ready, running, max_jobs, costs)

    def seconds(self, batch: Sequence[PricedJob], costs: StepCosts) -> float:
        """Seconds until the last of these jobs has taken its steps, all in one batch."""
        num_steps = max(job.num_steps for job in batch)
        return self.pace.seconds(num_steps, num_steps * costs.step_seconds(job.price for job in batch))

    def slack(self, job: PricedJob, batch: Sequence[PricedJob], costs: StepCosts, now: float) -> float:
        """Slack of a job that takes its remaining steps in a batch."""
        step = costs.step_seconds(one.price for one in batch)
        return job.terms.deadline - now - self.pace.seconds(job.num_steps, job.num_steps * step)

    def keeps_deadlines(
        self, batch: Sequence[PricedJob], joining: Sequence[PricedJob], costs: StepCosts, now: float
    ) -> bool:
        """Return whether all jobs that would meet their deadline still do if others join."""
        together = (*batch, *joining)
        return all(
            self.slack(job, together, costs, now) >= 0
            for job in batch
            if job.has_deadline and self.slack(job, batch, costs, now) >= 0
        )


class EarliestDeadline(Policy):
    def rank(self, claim: Standing, now: float) -> Rank:
        return claim.terms.priority, claim.terms.deadline, claim.terms.number


class LeastSlack(Policy):
    """PatchedServe's Algorithm 1. Nothing that was accepted is discarded: the hopeless wait until nobody else does."""

    def rank(self, claim: Standing, now: float) -> Rank:
        slack = claim.terms.deadline - now - claim.seconds
        return slack < 0, claim.terms.priority, slack, claim.terms.number

    def decide(self, waiting: Sequence[RankedGroup], num_ready: int, situation: Situation) -> Decision:
        running, max_jobs, costs, now = situation
        batch, joining, split = list(running), list[int](), None
        for index, group in enumerate(waiting):
            room = max_jobs - len(batch)
            if room <= 0 or split:
                break
            if not group.is_ready:
                continue
            jobs = group.priced(costs)
            part = jobs[:room]
            is_wanted = self.keeps_deadlines(batch, part, costs, now) and benefit(batch, part, costs) >= BENEFIT
            if batch and not is_wanted:
                continue
            split = Split(index, room) if len(part) < len(jobs) else None
            batch += part
            joining.append(index)
        return Decision(joining, split)


class Preemptive(Policy):
    """Ranks, from the strongest reason to the weakest: within the tenant's share, overdue, priority, not yet late,
    least slack, first come. The batch is formed as if first come, except that nobody joins who makes a running job
    late."""

    def rank(self, claim: Standing, now: float) -> Rank:
        terms, slack = claim.terms, claim.terms.deadline - now - claim.seconds
        is_over, is_late = self.shares.is_over(terms.tenant), slack < 0
        if claim.num_overtaken >= (MAX_OVERTAKEN_LATE if is_late else MAX_OVERTAKEN):
            return is_over, 0, terms.number
        return is_over, 1, terms.priority, is_late, slack, terms.number

    def meet(self, tenants: Iterable[str]) -> None:
        self.shares.meet(tenants)

    def charge(self, tenants: Iterable[str], seconds: float) -> None:
        self.shares.charge(tenants, seconds)

    def decide(self, waiting: Sequence[RankedGroup], num_ready: int, situation: Situation) -> Decision:
        decision = self._join(waiting, num_ready, situation, is_strict=True)
        first = next((index for index, group in enumerate(waiting) if group.is_ready), None)
        if first is None or first in decision.joining or not situation.running:
            return decision
        victims = self._victims(waiting[first], situation)
        for num_leaving in range(1, len(victims) + 1):
            leaving = sorted(victims[:num_leaving])
            staying = [job for index, job in enumerate(situation.running) if index not in leaving]
            decision = self._join(waiting, num_ready, situation._replace(running=staying), is_strict=True)
            if first in decision.joining:
                return decision._replace(leaving=leaving)
        return self._join(waiting, num_ready, situation, is_strict=False)

    def _join(self, waiting: Sequence[RankedGroup], num_ready: int, situation: Situation, is_strict: bool) -> Decision:
        """Let groups join. If `is_strict`, none does that would be late in this batch and not in one of its own."""

        def admit(group: Sequence[PricedJob], batch: Sequence[PricedJob], num_waiting: int, costs: StepCosts) -> bool:
            is_kept = self.keeps_deadlines(batch, group, costs, situation.now)
            if is_strict:
                is_kept = is_kept and self.keeps_deadlines(group, batch, costs, situation.now)
            return is_kept and pays(group, batch, num_waiting, costs)

        running, max_jobs, costs, _ = situation
        return FirstCome(admit, keeps_room=True).decide(waiting, num_ready, running, max_jobs, costs)

    def _victims(self, group: RankedGroup, situation: Situation) -> list[int]:
        """Positions of the running jobs that may leave for a group, those that can best afford it first."""
        running, _, costs, now = situation
        claim = self.claim_of(group, costs)
        rank = self.rank(claim, now)
        ranked = []
        for index, job in enumerate(running):
            own = self._running_rank(job, situation)
            if own[:3] > rank[:3] or (own[:3] == rank[:3] and self._can_wait(job, claim, situation)):
                ranked.append((own, index))
        return [index for _, index in sorted(ranked, reverse=True)]

    def _running_rank(self, job: PricedJob, situation: Situation) -> Rank:
        running, _, costs, now = situation
        seconds = job.terms.deadline - now - self.slack(job, running, costs, now) if job.has_deadline else 0.0
        return self.rank(Standing(job.terms, seconds, job.num_overtaken), now)

    def _can_wait(self, job: PricedJob, claim: Standing, situation: Situation) -> bool:
        """Return whether a running job may leave for one of its own class: the other is late if it waits for the first
        running job to end, and this one is not late if it waits for the other, or is late anyway."""
        running, _, costs, now = situation
        slack = claim.terms.deadline - now - claim.seconds
        num_steps = min(one.num_steps for one in running)
        first_end = self.pace.seconds(num_steps, num_steps * costs.step_seconds(one.price for one in running))
        own = self.slack(job, running, costs, now)
        return 0 <= slack < first_end and (own < 0 or own > claim.seconds)


def benefit(batch: Sequence[PricedJob], joining: Sequence[PricedJob], costs: StepCosts) -> float:
    """How many times as many job steps per second a larger batch takes."""
    if not batch:
        return BENEFIT
    before, together = (costs.step_seconds(job.price for job in jobs) for jobs in (batch, (*batch, *joining)))
    return (len(batch) + len(joining)) / len(batch) * before / together


POLICIES: Mapping[Scheduling, Callable[[Scheduler, Pace, Shares], Policy]] = {
    "fcfs": Policy,
    "edf": EarliestDeadline,
    "slack": LeastSlack,
    "preemptive": Preemptive,
}


def make_policy(
    scheduling: Scheduling,
    batching: Batching = "continuous",
    pace: Pace | None = None,
    weights: Mapping[str, float] | None = None,
) -> Policy:
    """The policy of one worker. Ways of batching that exist to compare with are first come, first served."""
    kind = POLICIES[scheduling] if batching == "continuous" else Policy
    return kind(SCHEDULERS[batching], pace or Pace(), Shares(weights))

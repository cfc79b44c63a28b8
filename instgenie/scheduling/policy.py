"""The policy of a worker: who goes first, who joins the batch, and who leaves it for another. The step loop, the
cluster's queues, the router and the simulator ask the same object. It is arithmetic: no clock, no torch, no socket.

    fcfs        in the order of arrival
    edf         the earliest deadline first
    slack       PatchedServe's Algorithm 1: the least slack first; a job joins if the running ones still meet their
                deadlines and the batch gains enough; those that cannot meet their own any more wait for others
    preemptive  within fair shares and priorities, as many jobs in time as possible; running jobs with slack leave
                between two steps for one without; nobody is overtaken without end (see `preemptive`)

The slack of a job is the time that is left until its deadline beyond what its remaining steps take.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from instgenie.cost.table import Price, StepCosts
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.scheduler import Decision, Scheduler, Split, WaitingGroup
from instgenie.scheduling.shares import Shares
from instgenie.scheduling.terms import PricedJob, Standing

MAX_OVERTAKEN = 16  # younger jobs of its tenant that go before another one; then it is overdue: all others go after it
BENEFIT = 1.0  # slack: jobs per second of the larger batch, as a multiple of those before, from which on it grows

Rank = tuple[float, ...]  # lower goes first


Group = TypeVar("Group", bound=WaitingGroup)


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

    def _rank(self, claim: Standing, now: float) -> Rank:
        return (claim.terms.number,)

    def meet(self, tenants: Iterable[str]) -> None:
        """Note who has work now."""

    def charge(self, tenants: Iterable[str], seconds: float) -> None:
        """Note a step of jobs of these tenants, which are named once per job."""

    def ranks(self, claims: Sequence[Standing], now: float) -> list[Rank]:
        """The rank of each of those that want the same worker."""
        return [self._rank(claim, now) for claim in claims]

    def order(self, waiting: Sequence[Group], situation: Situation) -> list[Group]:
        """The queue, those that go first in front."""
        claims = self.claims([group.priced(situation.costs) for group in waiting], situation)
        ranks = self.ranks(claims, situation.now)
        return [waiting[index] for index in sorted(range(len(waiting)), key=ranks.__getitem__)]

    def claims(self, waiting: Sequence[Sequence[PricedJob]], situation: Situation) -> list[Standing]:
        """The claims of the waiting groups, then those of the running jobs."""
        groups = [*waiting, *([job] for job in situation.running)]
        num_sharing = min(sum(map(len, groups)), situation.max_jobs)
        return [self._claim(group, num_sharing, situation.costs) for group in groups]

    def _claim(self, group: Sequence[PricedJob], num_sharing: float, costs: StepCosts) -> Standing:
        num_steps = sum(job.num_steps for job in group) / num_sharing
        compute, load = (sum(job.num_steps * job.price[stream] for job in group) for stream in (0, 1))
        work = self.pace.seconds(num_steps, costs.total_seconds(num_steps, compute, load))
        return Standing(group[0].terms, self.seconds(group, costs), group[0].num_overtaken, work)

    def decide(self, waiting: Sequence[WaitingGroup], num_ready: int, situation: Situation) -> Decision:
        """Decide who joins and who leaves. `waiting` is in the order of `order`."""
        running, max_jobs, costs, _ = situation
        return self.scheduler.decide(waiting, num_ready, running, max_jobs, costs)

    def seconds(self, batch: Sequence[PricedJob], costs: StepCosts, others: Sequence[Price] = ()) -> float:
        """Seconds until the last of these jobs has taken its steps, all in one batch, beside others at these prices."""
        num_steps = max(job.num_steps for job in batch)
        prices = [*(job.price for job in batch), *others]
        return self.pace.seconds(num_steps, num_steps * costs.step_seconds(prices))

    def ends(self, batch: Sequence[PricedJob], costs: StepCosts) -> list[float]:
        """Seconds until each of these jobs has taken its steps, if they leave the batch one by one and nobody joins."""
        ends, end, num_taken = [0.0] * len(batch), 0.0, 0
        order = sorted(range(len(batch)), key=lambda index: batch[index].num_steps)
        steps = costs.seconds_as_jobs_leave([batch[index].price for index in order])
        for index, seconds in zip(order, steps, strict=True):
            if num_steps := batch[index].num_steps - num_taken:
                end += self.pace.seconds(num_steps, num_steps * seconds)
                num_taken += num_steps
            ends[index] = end
        return ends

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
    def _rank(self, claim: Standing, now: float) -> Rank:
        return claim.terms.priority, claim.terms.deadline, claim.terms.number


class LeastSlack(Policy):
    """PatchedServe's Algorithm 1. Nothing that was accepted is discarded: the hopeless wait until nobody can be in time
    whom they would delay."""

    def _rank(self, claim: Standing, now: float) -> Rank:
        slack = claim.terms.deadline - now - claim.seconds
        return slack < 0, claim.terms.priority, slack, claim.terms.number

    def decide(self, waiting: Sequence[WaitingGroup], num_ready: int, situation: Situation) -> Decision:
        running, max_jobs, costs, now = situation
        batch, joining, split = list(running), list[int](), None
        is_contended = any(job.has_deadline and self.slack(job, batch, costs, now) >= 0 for job in batch)
        for index, group in enumerate(waiting):
            room = max_jobs - len(batch)
            if room <= 0 or split:
                break
            if not group.is_ready:
                continue
            jobs = group.priced(costs)
            is_hopeless = jobs[0].terms.deadline - now < self.seconds(jobs, costs)
            if is_hopeless and is_contended:
                break
            is_contended |= not is_hopeless and jobs[0].has_deadline
            part = jobs[:room]
            is_wanted = self.keeps_deadlines(batch, part, costs, now) and benefit(batch, part, costs) >= BENEFIT
            if batch and not is_wanted:
                continue
            split = Split(index, room) if len(part) < len(jobs) else None
            batch += part
            joining.append(index)
        return Decision(joining, split)


def benefit(batch: Sequence[PricedJob], joining: Sequence[PricedJob], costs: StepCosts) -> float:
    """How many times as many jobs per second a larger batch does. Each step of a job is its share of the job: a job of
    few steps does more of itself in a step than one of many."""
    return jobs_per_second((*batch, *joining), costs) / jobs_per_second(batch, costs) if batch else BENEFIT


def jobs_per_second(batch: Sequence[PricedJob], costs: StepCosts) -> float:
    done = sum(1 / (job.num_taken + job.num_steps) for job in batch)
    return done / max(costs.step_seconds(job.price for job in batch), 1e-9)

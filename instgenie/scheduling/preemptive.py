"""The default policy: as many jobs in time as possible, within fair shares and priorities, and nobody waits for ever.

Jobs that can meet their deadlines together go in the order of these; where not all can, those with the most work are
given up first and wait until the others are served. Running jobs leave between two steps if that saves a deadline.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from instgenie.cost.table import Price, StepCosts
from instgenie.scheduling.policy import MAX_OVERTAKEN, Policy, Rank, Situation
from instgenie.scheduling.savable import hopeless, num_in_time
from instgenie.scheduling.scheduler import Decision, FirstCome, WaitingGroup, pays
from instgenie.scheduling.terms import NO_DEADLINE, PricedJob, Standing, Terms

MAX_OVERTAKEN_LATE = 256  # as `MAX_OVERTAKEN`, for a job that has a deadline: its deadline protects it until it is late
RESERVE = 0.3  # of an average job: the slack that jobs keep when others join, for those that arrive meanwhile
WORTH = 2.5  # how many times as long as in the batch a job takes alone if it is worth the slack of others
OVERDUE, DUE = 0, 1
SAVABLE, HOPELESS = 0, 1


class Judged(NamedTuple):
    """The waiting groups and the running jobs, in this order, beside each other."""

    claims: Sequence[Standing]
    ranks: Sequence[Rank]
    num_waiting: int
    savable: frozenset[Terms]  # of those that have a deadline and can meet it
    reserve: float  # seconds
    is_crowded: bool  # True if some have been given up

    def class_of(self, index: int) -> Rank:
        """Share, overdue, priority: what no deadline outweighs."""
        return self.ranks[index][:3]


@dataclass(frozen=True, eq=False)
class Guest:
    """A waiting group as a batch of several tenants sees it. It is overdue if jobs of its own tenant have overtaken it:
    against others its share protects it."""

    group: WaitingGroup
    jobs: Sequence[PricedJob]
    is_ready: bool  # False also if it is not to join now

    @property
    def is_overdue(self) -> bool:
        return self.jobs[0].num_overtaken >= MAX_OVERTAKEN

    @property
    def num_jobs(self) -> int:
        return self.group.num_jobs

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return self.jobs


class Preemptive(Policy):
    """Ranks, from the strongest reason to the weakest: within the tenant's share, overdue, priority, not hopeless,
    earliest deadline, first come. The batch is formed as if first come, except that nobody joins who takes the slack
    of a job that can be in time."""

    def meet(self, tenants: Iterable[str]) -> None:
        self.shares.meet(tenants)

    def charge(self, tenants: Iterable[str], seconds: float) -> None:
        self.shares.charge(tenants, seconds)

    def ranks(self, claims: Sequence[Standing], now: float) -> list[Rank]:
        classes: dict[Rank, list[int]] = {}
        for index, claim in enumerate(claims):
            classes.setdefault(self._class_of(claim), []).append(index)
        ranks: list[Rank] = [()] * len(claims)
        busy = 0.0
        for kind, members in sorted(classes.items()):
            is_overdue = kind[1] == OVERDUE
            given_up = set() if is_overdue else hopeless(claims, members, now, busy)
            for index in members:
                terms = claims[index].terms
                is_last = is_overdue or index in given_up
                place = NO_DEADLINE if is_last else terms.deadline
                ranks[index] = (*kind, HOPELESS if index in given_up else SAVABLE, place, terms.number)
            busy += sum(claims[index].work for index in members)
        return ranks

    def claims(self, waiting: Sequence[Sequence[PricedJob]], situation: Situation) -> list[Standing]:
        """The less time a job has left, the fewer others may share its steps, and the more of their fixed seconds are
        its own work."""
        claims = super().claims(waiting, situation)
        groups = [*waiting, *([job] for job in situation.running)]
        jobs = [job for group in groups for job in group]
        most = min(len(jobs), situation.max_jobs)
        mean = Price(*(sum(job.price[stream] for job in jobs) / max(len(jobs), 1) for stream in (0, 1)))
        for index, (group, claim) in enumerate(zip(groups, claims, strict=True)):
            num_sharing = self._num_sharing(group, claim, mean, situation)
            if num_sharing < most:
                claims[index] = self._claim(group, num_sharing, situation.costs)
        return claims

    def _num_sharing(self, group: Sequence[PricedJob], claim: Standing, mean: Price, situation: Situation) -> float:
        """Jobs that may share the steps of a group, itself among them, if it is to be in time. Without end if it has no
        deadline or cannot meet it."""
        spare = claim.terms.deadline - situation.now - claim.seconds
        if spare < 0 or spare == NO_DEADLINE:
            return math.inf
        longer = self.seconds(group, situation.costs, [mean]) - claim.seconds  # beside each other job
        return len(group) + spare / max(longer, 1e-9)

    def _class_of(self, claim: Standing) -> Rank:
        is_over = self.shares.is_over(claim.terms.tenant)
        limit = MAX_OVERTAKEN if claim.terms.deadline == NO_DEADLINE else MAX_OVERTAKEN_LATE
        return (is_over, OVERDUE, 0) if claim.num_overtaken >= limit else (is_over, DUE, claim.terms.priority)

    def decide(self, waiting: Sequence[WaitingGroup], num_ready: int, situation: Situation) -> Decision:
        judged = self._judge(waiting, situation)
        guests = [Guest(group, group.priced(situation.costs), group.is_ready) for group in waiting]
        decision = self._fill(guests, num_ready, situation, judged)
        return self._make_way(decision, guests, situation, judged)

    def _fill(self, waiting: Sequence[WaitingGroup], num_ready: int, situation: Situation, judged: Judged) -> Decision:
        """Let groups join and, in their order, let running jobs leave for those that did not."""
        decision = self._join(waiting, num_ready, situation, judged)
        ready = [index for index, group in enumerate(waiting) if group.is_ready]
        leaving: list[int] = []
        while left := [index for index in ready if index not in groups_of(decision)]:
            first = left[0]
            victims = [one for one in self._victims(first, situation, judged) if one not in leaving]
            for num_more in range(1, len(victims) + 1):
                gone = sorted((*leaving, *victims[:num_more]))
                staying = [job for index, job in enumerate(situation.running) if index not in gone]
                after = self._join(waiting, num_ready, situation._replace(running=staying), judged)
                if first in groups_of(after):
                    decision, leaving = after._replace(leaving=gone), gone
                    break
            else:
                break
        return decision

    def _make_way(self, decision: Decision, waiting: Sequence[Guest], situation: Situation, judged: Judged) -> Decision:
        """Let jobs of tenants that are over their share leave the batch, or wait, where they slow down others."""
        running, costs = situation.running, situation.costs
        staying = [index for index in range(len(running)) if index not in decision.leaving]
        batch = [running[index] for index in staying] + joining_jobs(decision, waiting, costs)
        own = [job for job in batch if not self._is_over(job)]
        if not own or len(own) == len(batch):
            return decision
        kept, leaving = list(own), set(decision.leaving)
        for index in sorted(staying, key=lambda index: judged.ranks[judged.num_waiting + index]):
            if self._is_over(running[index]):
                has_time = self._have_time_for([running[index]], kept, own, costs)
                kept += [running[index]] if has_time else []
                leaving |= set() if has_time else {index}
        guests = [
            replace(one, is_ready=not self._is_over(one.jobs[0]) or self._have_time_for(one.jobs, kept, own, costs))
            if one.is_ready
            else one
            for one in waiting
        ]
        num_ready = sum(group.num_jobs for group in guests if group.is_ready)
        left = [job for index, job in enumerate(running) if index not in leaving]
        after = self._join(guests, num_ready, situation._replace(running=left), judged)
        return after._replace(leaving=sorted(leaving))

    def _is_over(self, job: PricedJob) -> bool:
        return self.shares.is_over(job.terms.tenant)

    def _have_time_for(
        self, jobs: Sequence[PricedJob], kept: Sequence[PricedJob], own: Sequence[PricedJob], costs: StepCosts
    ) -> bool:
        """Return whether a step of the batch `kept` may have these jobs in it, besides the `own` jobs of others."""
        stretch = self.shares.stretch(jobs[0].terms.tenant, (job.terms.tenant for job in own))
        alone, together = (costs.step_seconds(job.price for job in batch) for batch in (own, (*kept, *jobs)))
        return together <= stretch * alone

    def _judge(self, waiting: Sequence[WaitingGroup], situation: Situation) -> Judged:
        claims = self.claims([group.priced(situation.costs) for group in waiting], situation)
        ranks = self.ranks(claims, situation.now)
        savable = frozenset(
            claim.terms
            for claim, rank in zip(claims, ranks, strict=True)
            if claim.terms.deadline != NO_DEADLINE and rank[3] == SAVABLE
        )
        reserve = RESERVE * sum(claim.work for claim in claims) / max(len(claims), 1)
        return Judged(claims, ranks, len(waiting), savable, reserve, any(rank[3] == HOPELESS for rank in ranks))

    def _join(self, waiting: Sequence[WaitingGroup], num_ready: int, situation: Situation, judged: Judged) -> Decision:
        """Let groups join, unless a job that can be in time would have too little slack left. Where not all can be in
        time, those join all the same that take much less of the worker's time in this batch than by themselves."""
        running, max_jobs, costs, now = situation

        def admit(group: Sequence[PricedJob], batch: Sequence[PricedJob], num_waiting: int, costs: StepCosts) -> bool:
            if not pays(group, batch, num_waiting, costs):
                return False
            together = (*batch, *group)
            latest = now + judged.reserve
            has_slack = all(
                latest + end <= job.terms.deadline
                for job, end in zip(together, self.ends(together, costs), strict=True)
                if job.terms in judged.savable
            )
            return has_slack or (judged.is_crowded and saving(group, batch, costs) >= WORTH)

        return FirstCome(admit, keeps_room=True).decide(waiting, num_ready, running, max_jobs, costs)

    def _victims(self, first: int, situation: Situation, judged: Judged) -> list[int]:
        """Positions of the running jobs that may leave for a waiting group, those that go last in front. Jobs of its
        own class leave only for one that can be in time, if more deadlines are met than if groups wait for the batch.
        """
        before, ranks = judged.num_waiting, judged.ranks
        running = range(before, len(ranks))
        later = sorted((one for one in running if ranks[one] > ranks[first]), key=ranks.__getitem__, reverse=True)
        by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
        if_waiting = sorted(by_rank, key=lambda one: one < before)  # the running ones end first
        met, met_if_waiting = (num_in_time(judged.claims, order, situation.now) for order in (by_rank, if_waiting))
        if met <= met_if_waiting or judged.claims[first].terms not in judged.savable:
            later = [one for one in later if judged.class_of(one) > judged.class_of(first)]
        return [one - before for one in later]


def groups_of(decision: Decision) -> set[int]:
    """Positions of the groups that join, whole or in part, in the queue before one of them is cut in two."""
    cut = decision.split
    return {position - bool(cut and position > cut.position) for position in decision.joining}


def saving(group: Sequence[PricedJob], batch: Sequence[PricedJob], costs: StepCosts) -> float:
    """How many times as long as in the batch the steps of a group take by themselves."""
    alone, before, together = (
        costs.step_seconds(job.price for job in jobs) for jobs in (group, batch, (*batch, *group))
    )
    return alone / max(together - before, 1e-9)


def joining_jobs(decision: Decision, waiting: Sequence[WaitingGroup], costs: StepCosts) -> list[PricedJob]:
    """The jobs that join; positions of a decision are those after its split."""
    groups = [group.priced(costs) for group in waiting]
    if cut := decision.split:
        groups[cut.position : cut.position + 1] = [groups[cut.position][: cut.num_first], groups[cut.position]]
    return [job for index in decision.joining for job in groups[index]]

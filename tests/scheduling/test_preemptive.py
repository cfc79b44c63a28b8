"""Single decisions of the default policy: who joins and who leaves, before one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from instgenie.cost.table import Price, StepCosts, linear_costs
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policies import make_policy
from instgenie.scheduling.policy import Situation
from instgenie.scheduling.preemptive import groups_of
from instgenie.scheduling.scheduler import Decision, Split
from instgenie.scheduling.terms import PricedJob, Terms

COSTS = linear_costs(per_step=0.5, per_token=0.0)
LOOSE, TIGHT, PAST = 100.0, 5.0, -1.0  # deadlines


class TruePace(Pace):
    """Steps take what is predicted."""

    def seconds(self, num_steps: float, predicted: float) -> float:
        return predicted


@dataclass(eq=False)
class Single:
    """A job that waits as a group of its own."""

    job: PricedJob
    is_ready: bool = True
    is_overdue: bool = False
    num_jobs: int = 1

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return [self.job]


def job(number: int, num_steps: int, deadline: float, price: float = 1.0) -> PricedJob:
    return PricedJob(Price(price, 0.0), num_steps, Terms(deadline, number=number))


def decide(waiting: list[PricedJob], running: list[PricedJob], max_jobs: int = 2) -> Decision:
    policy, situation = make_policy("preemptive", pace=TruePace()), Situation(running, max_jobs, COSTS, 0.0)
    groups = policy.order([Single(one) for one in waiting], situation)
    return policy.decide(groups, len(groups), situation)


def test_the_jobs_of_a_batch_end_one_by_one() -> None:
    """The short one leaves after a step of 2.5 seconds, and the other goes on alone."""
    policy = make_policy("preemptive", pace=TruePace())
    batch = [job(0, 3, LOOSE), job(1, 1, LOOSE), job(2, 3, LOOSE, price=0.0)]
    assert policy.ends(batch, COSTS) == pytest.approx([2.5 + 2 * 1.5, 2.5, 2.5 + 2 * 1.5])
    assert policy.ends([], COSTS) == []


def test_a_short_job_joins_where_the_long_ones_have_time_for_its_few_steps() -> None:
    """If the long one took all its steps beside the short one it would be late."""
    assert decide([job(1, 1, LOOSE)], [job(0, 8, 15.0)]).joining == [0]
    assert decide([job(1, 8, LOOSE)], [job(0, 8, 15.0)]).joining == []


def test_several_jobs_leave_before_one_step() -> None:
    urgent = [job(2, 1, TIGHT), job(3, 1, TIGHT)]
    decision = decide(urgent, [job(0, 8, LOOSE), job(1, 8, LOOSE)])
    assert (decision.joining, decision.leaving) == ([0, 1], [0, 1])


def test_no_more_jobs_leave_than_others_need() -> None:
    decision = decide([job(2, 1, TIGHT)], [job(0, 8, LOOSE), job(1, 8, 2 * LOOSE)])
    assert (decision.joining, decision.leaving) == ([0], [1])


def test_where_some_are_given_up_cheap_jobs_join_at_the_cost_of_slack() -> None:
    """Else those that are given up pile up, and the worker runs small batches beside a long queue."""
    tight = job(0, 3, 1.9, price=0.1)
    assert decide([job(1, 3, LOOSE, price=0.1)], [tight]).joining == []
    assert decide([job(1, 3, PAST, price=0.1)], [tight]).joining == [0]
    assert decide([job(1, 3, PAST)], [tight]).joining == []  # it takes nearly as long as by itself


def test_a_job_that_would_have_to_run_alone_is_given_up_for_a_batch() -> None:
    """The first is in time only if the others wait for it, and then these are late; together they are in time."""
    tight, others = job(0, 3, 1.9, price=0.1), [job(number, 3, 3.0, price=0.1) for number in (1, 2, 3)]
    assert set(decide([tight, *others], [], max_jobs=4).joining) >= {0, 1, 2}
    assert decide([tight], [], max_jobs=4).joining == [0]
    past = [job(number, 3, PAST, price=0.1) for number in (1, 2, 3)]
    policy, situation = make_policy("preemptive", pace=TruePace()), Situation([], 4, COSTS, 0.0)
    first, *_ = policy.order([Single(one) for one in (*past, tight)], situation)
    assert first.job is tight  # nobody else could be in time


def test_nobody_leaves_for_one_that_is_given_up() -> None:
    """Running jobs leave for the urgent one only, though others that wait go before them."""
    running = [job(4, 8, PAST), job(5, 8, PAST)]
    decision = decide([job(0, 8, PAST), job(1, 1, TIGHT)], running)
    assert len(decision.leaving) == len(decision.joining) == 1


def test_the_groups_that_join_are_found_though_one_is_cut_in_two() -> None:
    assert groups_of(Decision([0, 2])) == {0, 2}
    assert groups_of(Decision([0, 1, 3], Split(1, 2))) == {0, 1, 2}

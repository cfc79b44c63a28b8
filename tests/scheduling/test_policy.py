"""Policies: who goes first, who joins, who leaves for another. A small step loop drives them, as a worker does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instgenie.cost.table import Price, StepCosts, linear_costs
from instgenie.scheduling.names import Scheduling
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policies import POLICIES, make_policy
from instgenie.scheduling.policy import MAX_OVERTAKEN, Policy, Situation
from instgenie.scheduling.terms import NO_DEADLINE, PricedJob, Standing, Terms

COSTS = linear_costs(per_step=0.5, per_token=0.0)
DEAR = 1.0  # seconds that a job adds to a step


class TruePace(Pace):
    """Steps take what is predicted."""

    def seconds(self, num_steps: float, predicted: float) -> float:
        return predicted


@dataclass(eq=False)
class Waiter:
    """A job that waits as a group of its own."""

    name: str
    num_steps: int
    terms: Terms
    price: float = DEAR
    is_ready: bool = True
    is_overdue: bool = False
    num_own_overtaken: int = 0
    num_jobs: int = 1
    num_waited: int = 0  # steps
    num_taken: int = 0  # steps

    @property
    def job(self) -> PricedJob:
        return PricedJob(Price(self.price, 0.0), self.num_steps, self.terms, self.num_own_overtaken, self.num_taken)

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return [self.job]


@dataclass
class Loop:
    """The step loop of a worker in simulated time."""

    policy: Policy
    max_jobs: int = 2
    now: float = 0.0
    waiting: list[Waiter] = field(default_factory=list)
    running: list[Waiter] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)  # the names of the jobs of each step
    num_preempted: int = 0

    def add(self, name: str, num_steps: int = 4, price: float = DEAR, **terms: object) -> Waiter:
        number = terms.pop("number", len(self.waiting) + len(self.running))
        waiter = Waiter(name, num_steps, Terms(number=number, **terms), price)  # type: ignore[arg-type]
        self.waiting.append(waiter)
        return waiter

    def step(self) -> None:
        self.policy.meet(one.terms.tenant for one in (*self.waiting, *self.running))
        situation = Situation([one.job for one in self.running], self.max_jobs, COSTS, self.now)
        self.waiting = self.policy.order(self.waiting, situation)
        decision = self.policy.decide(self.waiting, sum(one.is_ready for one in self.waiting), situation)
        leaving = [self.running[index] for index in decision.leaving]
        joining = [self.waiting[index] for index in decision.joining]
        self.num_preempted += len(leaving)
        self.running = [one for one in self.running if one not in leaving] + joining
        self.waiting = [one for one in self.waiting if one not in joining] + leaving
        for one in self.waiting:
            younger = [other for other in joining if not other.num_taken and other.terms.number > one.terms.number]
            one.num_own_overtaken += sum(other.terms.tenant == one.terms.tenant for other in younger)
            one.num_waited += 1
        if not self.running:
            return
        seconds = COSTS.step_seconds(one.job.price for one in self.running)
        self.now += seconds
        self.policy.charge([one.terms.tenant for one in self.running], seconds)
        self.steps.append("".join(sorted(one.name for one in self.running)))
        for one in self.running:
            one.num_steps -= 1
            one.num_taken += 1
        self.running = [one for one in self.running if one.num_steps]

    def run(self) -> list[str]:
        while self.waiting or self.running:
            self.step()
        return self.steps


def make_loop(scheduling: Scheduling, max_jobs: int = 2) -> Loop:
    return Loop(make_policy(scheduling, pace=TruePace()), max_jobs)


def first_name(scheduling: Scheduling, *terms: Terms, seconds: float = 1.0) -> int:
    """The number of the claim that goes first."""
    ranks = make_policy(scheduling, pace=TruePace()).ranks([Standing(one, seconds, work=seconds) for one in terms], 0.0)
    return terms[ranks.index(min(ranks))].number


def test_who_goes_first() -> None:
    loose, tight, lost = Terms(100.0, number=0), Terms(5.0, number=1), Terms(0.5, number=2)
    important = Terms(200.0, priority=-1, number=3)
    every = (loose, tight, lost, important)
    assert first_name("fcfs", *every) == 0
    assert first_name("edf", *every) == 3
    assert first_name("edf", loose, tight, lost) == 2
    assert first_name("slack", loose, tight, lost) == 1  # one that is lost anyway lets others go
    assert first_name("preemptive", loose, tight, lost) == 1
    assert first_name("preemptive", *every) == 3


@pytest.mark.parametrize("scheduling", POLICIES)
def test_jobs_without_terms_go_in_the_order_of_arrival(scheduling: Scheduling) -> None:
    loop = make_loop(scheduling, max_jobs=1)
    for name in "abc":
        loop.add(name, 2)
    assert loop.run() == ["a", "a", "b", "b", "c", "c"]


def test_a_job_with_slack_leaves_the_batch_for_one_without() -> None:
    loop = make_loop("preemptive")
    loop.add("a", 8, deadline=100.0)
    loop.step()
    loop.add("b", 3, deadline=loop.now + 5)
    assert loop.run() == ["a", "b", "b", "b", *"aaaaaaa"]
    assert loop.num_preempted == 1


def test_a_job_without_slack_stays() -> None:
    loop = make_loop("preemptive")
    loop.add("a", 8, deadline=13.0)
    loop.step()
    loop.add("b", 3, deadline=loop.now + 5)
    assert loop.run()[:7] == ["a"] * 7
    assert loop.num_preempted == 0


def test_a_job_that_is_late_anyway_leaves_for_one_that_is_not() -> None:
    loop = make_loop("preemptive")
    loop.add("a", 8, deadline=3.0)
    loop.step()
    loop.add("b", 3, deadline=loop.now + 5)
    assert loop.run() == ["a", *"bbb", *"aaaaaaa"]


def test_a_job_of_higher_priority_takes_the_place_of_another() -> None:
    loop = make_loop("preemptive", max_jobs=1)
    loop.add("a", 4)
    loop.step()
    loop.add("b", 2, priority=-1)
    assert loop.run() == ["a", *"bb", *"aaa"]


def test_nobody_joins_who_makes_a_running_job_late() -> None:
    """Together each step takes longer; the batch has room, and alone both would pay."""
    for deadline, expected in ((math.inf, "ab"), (2.5, "a")):
        loop = make_loop("preemptive")
        loop.add("a", 4, price=0.1, deadline=deadline)
        loop.step()
        loop.add("b", 3, price=0.1)
        loop.step()
        assert loop.steps[1] == expected


def test_the_slack_policy_lets_jobs_join_while_all_meet_their_deadlines() -> None:
    loop = make_loop("slack")
    loop.add("a", 4, price=0.1, deadline=2.5)
    loop.add("b", 4, price=0.1, deadline=100.0)
    loop.step()
    assert loop.steps == ["a"]
    loop = make_loop("slack")
    loop.add("a", 4, price=0.1, deadline=3.0)
    loop.add("b", 4, price=0.1, deadline=100.0)
    loop.step()
    assert loop.steps == ["ab"]


def test_the_slack_policy_counts_jobs_per_second_and_not_their_steps() -> None:
    """The short job takes more of a step than the long one, and a batch of both takes fewer job steps per second. But
    it ends soon: if it waited for the long one, fewer jobs would be done in any time."""
    for num_steps, expected in ((2, "ab"), (24, "a")):
        loop = make_loop("slack")
        loop.add("a", 24, price=0.5, deadline=100.0)
        loop.step()
        loop.add("b", num_steps, price=3.0, deadline=90.0)
        loop.step()
        assert loop.steps == ["a", expected]


def test_the_hopeless_do_not_join_those_that_can_be_in_time() -> None:
    loop = make_loop("slack")
    loop.add("a", 4, price=0.1, deadline=100.0)
    loop.add("b", 4, price=0.1, deadline=0.5)
    loop.step()
    assert loop.steps == ["a"]
    assert loop.run()[3:] == ["a", "b", "b", "b", "b"]


def test_a_noisy_tenant_leaves_the_batch_for_a_quiet_one() -> None:
    loop = make_loop("preemptive", max_jobs=1)
    for number in range(4):
        loop.add("a", 50, tenant="noisy", number=number)
    for _ in range(10):
        loop.step()
    loop.add("b", 3, tenant="quiet", number=9)
    loop.run()
    assert loop.steps[10:14] == ["b", "b", "b", "a"]


def test_a_noisy_tenant_makes_way_though_the_batch_has_room() -> None:
    """Beside the jobs of the flood, each step of the quiet tenant's second job would take more than twice as long."""
    loop = make_loop("preemptive", max_jobs=8)
    loop.add("q", 1, tenant="quiet", number=0)
    loop.run()
    for number in range(1, 4):
        loop.add("n", 50, tenant="noisy", number=number)
    for _ in range(5):
        loop.step()
    loop.add("q", 3, tenant="quiet", number=9)
    for _ in range(4):
        loop.step()
    assert loop.steps[6:9] == ["q", "q", "q"]
    assert loop.steps[9] == loop.steps[5]


def test_a_noisy_tenant_stays_where_it_costs_others_next_to_nothing() -> None:
    loop = make_loop("preemptive", max_jobs=8)
    for number in range(3):
        loop.add("n", 50, price=0.01, tenant="noisy", number=number)
    for _ in range(20):
        loop.step()
    loop.add("q", 3, price=0.01, tenant="quiet", number=9)
    loop.step()
    assert loop.steps[-1] == "nnnq"


def test_two_tenants_that_always_have_work_share_the_batch() -> None:
    """Neither leaves the batch again and again: the one with more jobs runs as many as its share of a step allows."""
    loop = make_loop("preemptive", max_jobs=8)
    for number in range(4):
        loop.add("abbb"[number], 200, tenant="abbb"[number], number=number)
    for _ in range(100):
        loop.step()
    assert set(loop.steps[20:]) <= {"ab", "abb"}
    assert loop.num_preempted <= 10
    served = [sum(1 / len(step) for step in loop.steps for one in step if one == name) for name in "ab"]
    assert served[1] < 1.5 * served[0]


def test_a_new_tenant_does_not_make_others_pay_for_idle_time() -> None:
    """Two tenants used the worker for a minute each. A third one that comes with a flood is soon behind them."""
    loop = make_loop("preemptive", max_jobs=1)
    for number in range(80):
        loop.add("ab"[number % 2], 1, tenant="ab"[number % 2], number=number)
    loop.run()
    loop.steps.clear()
    for number in range(100, 104):
        loop.add("n", 50, tenant="new", number=number)
    loop.add("a", 2, tenant="a", number=110)
    for _ in range(8):
        loop.step()
    assert loop.steps.index("a") <= 3
    assert loop.steps.count("a") == 2


def test_shares_follow_weights() -> None:
    """Two tenants that always have work share the steps by their weights."""
    policy = make_policy("preemptive", pace=TruePace(), weights={"x": 3.0})
    loop = Loop(policy, max_jobs=1)
    for number in range(200):
        loop.add("xy"[number % 2], 2, tenant="xy"[number % 2], number=number)
    for _ in range(160):
        loop.step()
    served = [loop.steps[40:].count(name) for name in "xy"]
    assert 2.5 < served[0] / served[1] < 3.5


jobs = st.lists(
    st.tuples(
        st.integers(1, 3),  # steps
        st.sampled_from([NO_DEADLINE, 2.0, 30.0]),  # seconds to its deadline
        st.integers(-1, 1),  # priority
        st.integers(0, 12),  # arrives before this step
        st.sampled_from([0.01, 1.0]),  # price
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs, st.integers(1, 3), st.sampled_from(sorted(POLICIES)))
def test_every_job_ends_within_a_bound_and_no_step_is_wasted(
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[tuple[int, float, int, int, float]],
    max_jobs: int,
    scheduling: Scheduling,
) -> None:
    """A job waits for those before it, for those that may overtake it and for one batch, each of which takes up to
    three steps. The policies `edf` and `slack` promise no bound beyond all the work there is."""
    monkeypatch.setattr("instgenie.scheduling.preemptive.MAX_OVERTAKEN", 2)
    monkeypatch.setattr("instgenie.scheduling.preemptive.MAX_OVERTAKEN_LATE", 4)
    loop = make_loop(scheduling, max_jobs)
    arriving = sorted(drawn, key=lambda one: one[3])
    made: list[tuple[Waiter, int]] = []
    total, step = sum(num_steps for num_steps, *_ in drawn), 0
    while arriving or loop.waiting or loop.running:
        while arriving and arriving[0][3] <= step:
            num_steps, left, priority, _, price = arriving.pop(0)
            ahead = sum(one.num_steps for one, _ in made)
            one = loop.add("j", num_steps, price, deadline=loop.now + left, number=len(made), priority=priority)
            is_bounded = scheduling in ("preemptive", "fcfs")
            made.append((one, ahead + 3 * (4 + max_jobs) if is_bounded else total))
        has_work, num_before = bool(loop.waiting or loop.running), len(loop.steps)
        loop.step()
        assert len(loop.steps) - num_before == has_work  # no step is idle beside waiting work
        assert len(loop.running) <= max_jobs
        step += 1
    assert all(one.num_waited <= bound for one, bound in made)


flood = st.lists(
    st.tuples(
        st.integers(1, 3), st.sampled_from([NO_DEADLINE, 4.0, 30.0]), st.integers(-1, 0), st.sampled_from([0.01, 1.0])
    ),
    min_size=24,
    max_size=30,
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flood, st.integers(1, 2), st.sampled_from([NO_DEADLINE, 2.0, 1000.0]))
def test_no_flood_starves_a_job_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch, drawn: list[tuple[int, float, int, float]], max_jobs: int, left: float
) -> None:
    """One job of low priority, with or without a deadline, then one of higher priority at every step. The first waits
    for at most four others and for a batch, each of up to three steps."""
    monkeypatch.setattr("instgenie.scheduling.preemptive.MAX_OVERTAKEN", 2)
    monkeypatch.setattr("instgenie.scheduling.preemptive.MAX_OVERTAKEN_LATE", 4)
    loop = make_loop("preemptive", max_jobs)
    poor = loop.add("p", 3, deadline=left, priority=1, number=0)
    for number, (num_steps, flood_left, priority, price) in enumerate(drawn, 1):
        loop.add("f", num_steps, price, deadline=loop.now + flood_left, priority=priority, number=number)
        loop.step()
    assert poor.num_waited <= 3 * (4 + max_jobs)


def test_nobody_is_starved_by_a_flood_of_higher_priority() -> None:
    """Each job of the flood arrives before the last one has ended. Without ageing the first job would never run."""
    loop = make_loop("preemptive", max_jobs=1)
    poor = loop.add("p", 2, number=0)
    for number in range(1, 3 * MAX_OVERTAKEN):
        loop.add("r", 2, priority=-1, number=number)
        loop.step()
        loop.step()
    assert poor.num_steps == 0
    assert poor.num_waited <= 2 * (MAX_OVERTAKEN + 1)
    edf = make_loop("edf", max_jobs=1)
    starved = edf.add("p", 2, number=0)
    for number in range(1, 3 * MAX_OVERTAKEN):
        edf.add("r", 2, priority=-1, number=number)
        edf.step()
        edf.step()
    assert starved.num_steps == 2


@settings(deadline=None, max_examples=100)
@given(jobs.filter(bool), st.integers(1, 3), st.data())
def test_a_higher_priority_never_makes_a_job_end_later(
    drawn: list[tuple[int, float, int, int, float]], max_jobs: int, data: st.DataObject
) -> None:
    """All jobs are of one tenant, wait from the start and are equal but for priority and arrival."""
    chosen = data.draw(st.integers(0, len(drawn) - 1))

    def end_of(raised: int) -> int:
        loop = make_loop("preemptive", max_jobs)
        watched = [
            loop.add("j", 2, number=number, priority=priority - (raised if number == chosen else 0))
            for number, (_, _, priority, *_) in enumerate(drawn)
        ][chosen]
        while watched.num_steps:
            loop.step()
        return len(loop.steps)

    assert end_of(1) <= end_of(0)

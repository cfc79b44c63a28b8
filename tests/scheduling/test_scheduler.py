"""The scheduler: which waiting groups join the running batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from instgenie.cost.table import Price, StepCosts, linear_costs
from instgenie.scheduling.names import Batching
from instgenie.scheduling.scheduler import LONG, PATIENCE, SCHEDULERS, Decision, Split, pays
from instgenie.scheduling.terms import PricedJob

SHARED = linear_costs(per_step=1.0, per_token=0.0)  # a step takes as long, however many jobs share it
FREE = PricedJob(Price(0.0, 0.0), 4)
DEAR = PricedJob(Price(50.0, 0.0), 4)


@dataclass
class Group:
    jobs: Sequence[PricedJob]
    is_ready: bool = True
    is_overdue: bool = False
    num_priced: int = 0

    @property
    def num_jobs(self) -> int:
        return len(self.jobs)

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        self.num_priced += 1
        return self.jobs


def decide(
    batching: Batching, groups: Sequence[Group], running: Sequence[PricedJob], max_jobs: int = 4
) -> tuple[list[int], Split | None]:
    num_ready = sum(len(group.jobs) for group in groups if group.is_ready)
    decision = SCHEDULERS[batching].decide(groups, num_ready, running, max_jobs, SHARED)
    return list(decision.joining), decision.split


@pytest.mark.parametrize(
    ("sizes", "num_running", "batching", "num_joining"),
    [
        ([1, 1, 1], 0, "continuous", 3),
        ([1, 1, 1], 2, "continuous", 2),
        ([1, 1, 1], 4, "continuous", 0),
        ([2, 3, 1], 0, "continuous", 1),  # no group overtakes one that does not fit
        ([9, 1], 0, "continuous", 1),  # larger than a batch: alone
        ([9, 1], 1, "continuous", 0),
        ([1, 1], 1, "static", 0),
        ([1, 1], 1, "static-pipelined", 0),
        ([1, 1, 3], 0, "static", 2),
        ([], 0, "naive", 0),
    ],
)
def test_groups_join_in_order_while_there_is_room(
    sizes: list[int], num_running: int, batching: Batching, num_joining: int
) -> None:
    groups = [Group([FREE] * size) for size in sizes]
    assert decide(batching, groups, [FREE] * num_running) == (list(range(num_joining)), None)


@pytest.mark.parametrize(
    ("compute", "load", "num_left", "num_waiting", "expected"),
    [
        (1.0, 0.0, 4, 1, True),  # as much as the fixed cost of a step
        (5.0, 0.0, 4, 1, False),
        (5.0, 0.0, 4, 2, True),  # the longer the queue, the larger the batch
        (50.0, 0.0, 4, 9, False),
        (50.0, 0.0, 7, 1, False),
        (50.0, 0.0, 8, 1, True),  # needs half the steps of the running job
        (5.0, 50.0, 4, 1, False),  # has a load of its own
    ],
)
def test_a_batch_grows_while_that_pays(
    compute: float, load: float, num_left: int, num_waiting: int, expected: bool
) -> None:
    """One job runs; the first waiting job has four steps."""
    price = Price(compute, load)
    assert pays([PricedJob(price, 4)], [PricedJob(price, num_left)], num_waiting, SHARED) == expected


def test_a_job_that_loads_nothing_computes_for_free_beside_one_that_loads() -> None:
    near, far = PricedJob(Price(5.0, 0.0), 4), PricedJob(Price(5.0, 50.0), 4)
    assert pays([near], [far], 1, SHARED)
    assert not pays([far], [near], 1, SHARED)


def test_a_naive_batch_takes_every_job() -> None:
    groups = [Group([DEAR]) for _ in range(3)]
    assert decide("naive", groups, [DEAR], 8) == ([0, 1, 2], None)
    assert decide("continuous", groups, [DEAR], 8) == ([], None)
    assert decide("continuous", groups, [], 8) == ([0], None)


def test_groups_whose_activations_are_loading_are_passed_over() -> None:
    groups = [Group([FREE], is_ready=False), Group([FREE]), Group([FREE], is_ready=False), Group([FREE])]
    assert decide("continuous", groups, [FREE]) == ([1, 3], None)
    assert [group.num_priced for group in groups] == [0, 1, 0, 1]


def test_a_group_that_would_wait_longer_than_it_runs_is_split() -> None:
    """The batch has room for one of two jobs of four steps."""
    loading, group = Group([FREE], is_ready=False), Group([FREE, FREE])
    for num_left, expected in ((5, ([1], Split(1, 1))), (4, ([], None))):
        running = [PricedJob(FREE.price, num_left)] * 3
        assert decide("continuous", [loading, group], running) == expected


def test_a_split_group_waits_until_joining_pays() -> None:
    running = [PricedJob(DEAR.price, 5)] * 3
    assert decide("continuous", [Group([DEAR, DEAR])], running) == ([], Split(0, 1))
    assert decide("naive", [Group([DEAR, DEAR])], running) == ([0], Split(0, 1))
    assert decide("static", [Group([DEAR, DEAR])], running) == ([], None)


def test_only_groups_that_may_join_are_priced() -> None:
    groups = [Group([FREE]) for _ in range(1000)]
    assert decide("continuous", groups, [FREE] * 2) == ([0, 1], None)
    assert sum(group.num_priced for group in groups) == 2


@pytest.mark.parametrize(
    ("sizes", "running", "max_jobs", "expected"),
    [
        ([("L", 8)], "", 8, ([0], Split(0, 1))),  # one joins at a time
        ([("L", 8)], "LLLLL", 8, ([0], Split(0, 1))),  # a quarter of the slots stays free
        ([("L", 8), ("S", 1)], "", 8, ([0, 2], Split(0, 1))),  # the rest of the group is between them
        ([("L", 2), ("S", 1), ("S", 1), ("S", 1)], "LLLLLL", 8, ([1, 2], None)),
        ([("L", 2), ("S", 1)], "LLLLL", 8, ([0, 2], Split(0, 1))),
        ([("L", 1), ("L", 2), ("S", 1)], "LLLL", 8, ([0, 2], None)),
        ([("L", 1)], "LS", 4, ([0], None)),
        ([("L", 3)], "SSSSSS", 8, ([0], Split(0, 1))),  # a long group does not wait until all of it fits
        ([("L", 2)], "", 2, ([0], Split(0, 1))),
        ([("L", 2)], "", 1, ([0], Split(0, 1))),
        ([("L", 1)], "L", 1, ([], None)),
    ],
)
def test_long_jobs_leave_room_for_others(
    sizes: list[tuple[str, int]], running: str, max_jobs: int, expected: tuple[list[int], Split | None]
) -> None:
    """L is a long job, S a short one."""
    kinds = {"L": PricedJob(FREE.price, LONG + 1), "S": FREE}
    groups = [Group([kinds[kind]] * num) for kind, num in sizes]
    assert decide("continuous", groups, [kinds[kind] for kind in running], max_jobs) == expected


def test_a_long_group_that_does_not_pay_is_overtaken_until_it_is_overdue() -> None:
    long, other = PricedJob(DEAR.price, 600), PricedJob(DEAR.price, 1000)
    for is_overdue, expected in ((False, [1]), (True, [0, 1])):
        groups = [Group([long], is_overdue=is_overdue), Group([DEAR])]
        assert decide("continuous", groups, [other], 8) == (expected, None)


def test_long_jobs_share_a_batch_only_as_far_as_that_raises_throughput() -> None:
    """Each step costs 1 s, and each job as much as its price. A fourth job at 2 s raises the throughput by 4 %."""
    costs = linear_costs(per_step=1.0, per_token=0.0)
    for price, expected in ((0.1, 6), (2.0, 3)):
        long = PricedJob(Price(price, 0.0), 1000)
        running: list[PricedJob] = []
        for _ in range(10):
            decision = SCHEDULERS["continuous"].decide([Group([long])], 10, running, 8, costs)
            running += [long] * len(decision.joining)
        assert len(running) == expected


def test_a_job_is_no_longer_long_near_its_end() -> None:
    running = [PricedJob(FREE.price, LONG)] * 3
    assert decide("continuous", [Group([PricedJob(FREE.price, LONG + 1)])], running, 4) == ([0], None)


def reference(
    batching: Batching, groups: Sequence[Group], running: Sequence[PricedJob], max_jobs: int, costs: StepCosts
) -> Decision:
    """The rules one by one, over a copy of the queue."""
    if batching.startswith("static") and running:
        return Decision()
    queue = [(position, list(group.jobs)) for position, group in enumerate(groups) if group.is_ready]
    split = None
    room = max_jobs - len(running)
    if queue and running and 0 < room < len(queue[0][1]):
        position, first = queue[0]
        left = sorted(job.num_steps for job in running)
        num_leaving = min(len(first) - room, len(left))
        if left[num_leaving - 1] > max(job.num_steps for job in first):
            split = Split(position, room)
            queue[0:1] = [(position, first[:room]), (position + 1, first[room:])]
    batch, joining, num_waiting = list(running), [], sum(len(jobs) for _, jobs in queue)
    for position, jobs in queue:
        if batch and len(batch) + len(jobs) > max_jobs:
            break
        if batch and batching == "continuous":
            num_steps = max(job.num_steps for job in jobs)
            num_peers = len([job for job in batch if job.num_steps < 2 * num_steps])
            lost = costs.step_seconds(job.price for job in [*batch, *jobs]) - costs.step_seconds(
                job.price for job in batch
            )
            gain = costs.step_seconds(job.price for job in jobs) - lost
            if num_peers and num_waiting * gain < PATIENCE * num_peers * lost:
                break
        batch += jobs
        joining.append(position)
        num_waiting -= len(jobs)
    return Decision(joining, split)


@pytest.mark.parametrize("batching", SCHEDULERS)
def test_decisions_follow_the_rules_on_random_queues(batching: Batching) -> None:
    chance = random.Random(0)

    def job() -> PricedJob:
        return PricedJob(Price(3 * chance.random(), chance.choice((0.0, 5 * chance.random()))), chance.randint(1, 12))

    seen = set()
    for _ in range(3000):
        groups = [
            Group([job() for _ in range(chance.choice((1, 1, 2, 3, 9)))], chance.random() < 0.8)
            for _ in range(chance.randint(0, 5))
        ]
        running, max_jobs = [job() for _ in range(chance.randint(0, 6))], chance.randint(1, 8)
        num_ready = sum(len(group.jobs) for group in groups if group.is_ready)
        decision = SCHEDULERS[batching].decide(groups, num_ready, running, max_jobs, SHARED)
        assert decision == reference(batching, groups, running, max_jobs, SHARED)
        seen.add((len(decision.joining), decision.split is not None))
    assert {num for num, _ in seen} >= {0, 1, 2, 3}
    assert (True in {is_split for _, is_split in seen}) == (batching in ("continuous", "naive"))

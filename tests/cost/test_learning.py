"""A table of step costs that measured steps correct."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from instgenie.cost.learning import NUM_FIRST, LearntCosts, solve
from instgenie.cost.table import Price, StepCosts, linear_costs

TABLE = replace(linear_costs(per_step=1.0, per_token=0.1), per_pass=1.0)
TOKENS = 10


def true_seconds(kinds: list[tuple[int, bool]]) -> float:
    """Another law than the table's: a pass is dearer, each job has a fixed cost, and tokens are cheap."""
    num_passes = len({is_dense for _, is_dense in kinds})
    return 5.0 * num_passes + 2.0 * len(kinds) + 0.3 * sum(TOKENS if is_dense else num for num, is_dense in kinds)


def prices(costs: StepCosts, kinds: list[tuple[int, bool]]) -> list[Price]:
    return [costs.price(TOKENS, num, None if is_dense else "host") for num, is_dense in kinds]


def draw(chance: random.Random) -> list[tuple[int, bool]]:
    return [(chance.randint(1, TOKENS), chance.random() < 0.3) for _ in range(chance.randint(1, 6))]


def taught(num_steps: int, factor: float = 1.0) -> LearntCosts:
    chance, learnt = random.Random(0), LearntCosts(TABLE)
    for _ in range(num_steps):
        kinds = draw(chance)
        learnt.measure(prices(TABLE, kinds), factor * true_seconds(kinds))
    return learnt


def error(learnt: LearntCosts) -> float:
    """The mean relative error of the corrected table, with the ratio that it was corrected by."""
    chance, errors = random.Random(1), []
    for _ in range(200):
        kinds = draw(chance)
        predicted = learnt.costs.ratio * learnt.costs.step_seconds(prices(learnt.costs, kinds))
        errors.append(abs(predicted / true_seconds(kinds) - 1))
    return sum(errors) / len(errors)


def test_measured_steps_correct_what_a_pass_a_job_and_computing_cost() -> None:
    assert error(taught(NUM_FIRST - 1)) > 0.5
    assert error(taught(NUM_FIRST)) < 0.15
    assert error(taught(320)) < 0.02


def test_the_unit_of_the_table_stays_what_it_was_at_the_first_correction() -> None:
    """So that the pace of the worker, which is the factor to seconds, does not jump again and again."""
    learnt = taught(NUM_FIRST)
    ratio, chance = learnt.costs.ratio, random.Random(2)
    for _ in range(640):
        kinds = draw(chance)
        learnt.measure(prices(TABLE, kinds), 3 * true_seconds(kinds))
    assert learnt.costs.ratio == ratio
    kinds = draw(chance)
    predicted = ratio * learnt.costs.step_seconds(prices(learnt.costs, kinds))
    assert predicted == pytest.approx(3 * true_seconds(kinds), rel=0.05)


def test_equal_steps_leave_the_proportions_of_the_table() -> None:
    learnt, one = LearntCosts(TABLE), [(5, False)]
    for _ in range(64):
        learnt.measure(prices(TABLE, one), 30.0)
    assert learnt.costs.ratio * learnt.costs.step_seconds(prices(learnt.costs, one)) == pytest.approx(30.0, rel=0.01)
    pair = learnt.costs.ratio * learnt.costs.step_seconds(prices(learnt.costs, one * 2))
    assert 30.0 < pair < 60.0


def test_steps_that_wait_for_loads_say_nothing() -> None:
    learnt = LearntCosts(TABLE)
    assert not any(learnt.measure([Price(0.1, 50.0)], 50.0) for _ in range(100))
    assert learnt.costs == TABLE


def test_no_coefficient_is_negative() -> None:
    """Steps that take less the more jobs they have, as noise may have it."""
    learnt = LearntCosts(TABLE)
    for index in range(64):
        kinds = [(5, False)] * (1 + index % 4)
        learnt.measure(prices(TABLE, kinds), 10.0 - len(kinds))
    costs = learnt.costs
    assert min(costs.per_step, costs.per_job, costs.dense.compute, *(price.compute for price in costs.gpu)) >= 0
    assert solve(np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([0.5, 1.0])) == [0.0, pytest.approx(1.0)]


def test_small_jobs_pay_the_whole_fixed_cost_of_a_job() -> None:
    costs = replace(TABLE, per_job=2.0)
    assert costs.price(TOKENS, 0, "host").compute == costs.price(TOKENS / 2, 0, "host").compute == 2.0
    assert costs.price(TOKENS / 2, 0, None).compute == pytest.approx(2.5)
    assert costs.own_price(TOKENS, 0, 0.5).compute == pytest.approx(2.5)


def test_dense_jobs_beside_others_take_a_pass_of_their_own() -> None:
    dense, cached = TABLE.price(TOKENS, 0, None), TABLE.price(TOKENS, 0, "host")
    assert TABLE.step_seconds([cached, cached]) == pytest.approx(1.0)
    assert TABLE.step_seconds([dense, dense]) == pytest.approx(3.0)
    assert TABLE.step_seconds([dense, cached]) == pytest.approx(3.0)
    half = TABLE.mean_price(TOKENS, 0, "host", 1, 2)
    assert half == (pytest.approx(0.5), 0.0, 0.5)
    assert TABLE.step_seconds([half, cached]) == pytest.approx(2.0)  # half of its steps take two passes
    together = replace(TABLE, per_pass=0.0)  # a network that runs them in one pass
    assert together.step_seconds([dense, cached]) == pytest.approx(2.0)


def test_steps_get_shorter_as_jobs_leave() -> None:
    chance = random.Random(3)
    every = [Price(chance.random(), 3 * chance.random(), chance.choice((0.0, 0.3, 1.0))) for _ in range(6)]
    expected = [TABLE.step_seconds(every[index:]) for index in range(6)]
    assert TABLE.seconds_as_jobs_leave(every) == pytest.approx(expected)
    assert TABLE.seconds_as_jobs_leave([]) == []

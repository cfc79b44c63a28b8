"""Which step's activations serve a step."""

import pytest

from instgenie.cost.kept_steps import KeptSteps, at_shares, every_step, stride_of


def test_the_latest_kept_step_serves_a_step() -> None:
    kept = KeptSteps(10, (0, 4, 7))
    assert [kept.serving(step) for step in range(10)] == [0, 0, 0, 0, 4, 4, 4, 7, 7, 7]
    assert [kept.slot(step) for step in range(10)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [step for step in range(10) if step in kept] == [0, 4, 7]
    assert kept.share == 0.3


def test_a_stride_keeps_the_middle_of_every_so_many_steps() -> None:
    fourth = every_step(10, stride=4)
    assert fourth.steps == (2, 6, 9)
    assert [fourth.serving(step) for step in range(10)] == [2, 2, 2, 2, 6, 6, 6, 6, 9, 9]
    assert [step for step in range(10) if step in fourth] == [2, 6, 9]
    assert every_step(3).steps == (0, 1, 2)
    assert every_step(5, stride=9).steps == (2,)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 28])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7, 40])
def test_no_step_is_farther_from_the_one_that_serves_it_than_half_a_stride(num_steps: int, stride: int) -> None:
    kept = every_step(num_steps, stride)
    assert len(kept.steps) == -(-num_steps // stride)
    assert all(abs(kept.serving(step) - step) <= stride // 2 for step in range(num_steps))


def test_the_last_steps_keep_their_slots() -> None:
    whole = every_step(10, stride=4)
    last = whole.last(5)
    assert [last.slot(step) for step in range(5)] == [whole.slot(step) for step in range(5, 10)]
    assert [last.serving(step) + 5 for step in range(5)] == [whole.serving(step) for step in range(5, 10)]
    assert whole.last(10) == whole


def test_shares_become_steps_and_the_first_step_is_always_kept() -> None:
    assert at_shares(28, (1 / 7, 3 / 7)).steps == (0, 4, 12)
    assert at_shares(2, (1 / 7, 3 / 7)).steps == (0, 1)
    assert at_shares(1, (0.9,)).steps == (0,)


def test_a_stride_is_chosen_so_that_few_steps_are_kept() -> None:
    assert [stride_of(0, num_steps) for num_steps in (1, 3, 4, 8, 28, 50)] == [1, 1, 1, 2, 7, 12]
    assert stride_of(5, 28) == 5

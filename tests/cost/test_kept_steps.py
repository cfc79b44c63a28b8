"""Which step's activations serve a step."""

from instgenie.cost.kept_steps import KeptSteps, at_shares, every_step


def test_the_latest_kept_step_serves_a_step() -> None:
    kept = KeptSteps(10, (0, 4, 7))
    assert [kept.serving(step) for step in range(10)] == [0, 0, 0, 0, 4, 4, 4, 7, 7, 7]
    assert [kept.slot(step) for step in range(10)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [step for step in range(10) if step in kept] == [0, 4, 7]
    assert kept.share == 0.3


def test_a_stride_keeps_every_so_many_steps() -> None:
    assert every_step(10, stride=4).steps == (0, 4, 8)
    assert every_step(3).steps == (0, 1, 2)


def test_the_last_steps_keep_their_slots() -> None:
    whole = every_step(10, stride=4)
    last = whole.last(5)
    assert [last.slot(step) for step in range(5)] == [whole.slot(step) for step in range(5, 10)]
    assert whole.last(10) == whole


def test_shares_become_steps_and_the_first_step_is_always_kept() -> None:
    assert at_shares(28, (1 / 7, 3 / 7)).steps == (0, 4, 12)
    assert at_shares(2, (1 / 7, 3 / 7)).steps == (0, 1)
    assert at_shares(1, (0.9,)).steps == (0,)

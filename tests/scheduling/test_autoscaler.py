"""The number of workers that a load asks for."""

from instgenie.scheduling.autoscaler import Autoscaler, ScalingConfig

CONFIG = ScalingConfig(min_workers=1, max_workers=4, queue_seconds=10.0, idle_seconds=60.0)


def play(loads: list[tuple[float, float, int]], num_workers: int = 1) -> list[int]:
    """The number of workers after each moment, seconds of work and number of edits."""
    scaler, numbers = Autoscaler(CONFIG), []
    for now, seconds, num_edits in loads:
        num_workers = scaler.decide(now, seconds, num_edits, num_workers)
        numbers.append(num_workers)
    return numbers


def test_a_queue_that_stays_long_gets_more_workers() -> None:
    assert play([(0, 25, 9), (1, 25, 9), (2, 25, 9)]) == [1, 1, 3]


def test_a_moment_is_no_reason_for_more() -> None:
    assert play([(0, 25, 9), (1, 5, 2), (2, 25, 9), (3, 25, 9)]) == [1, 1, 1, 1]


def test_one_long_edit_is_no_reason_for_more() -> None:
    assert play([(0, 500, 1), (10, 500, 1)]) == [1, 1]


def test_there_are_never_more_than_the_most() -> None:
    assert play([(0, 1e6, 999), (2, 1e6, 999)]) == [1, 4]


def test_an_idle_cluster_shrinks_to_the_least_after_a_while() -> None:
    assert play([(0, 0, 0), (30, 0, 0), (59, 0, 0), (60, 0, 0), (61, 0, 0)], 4) == [4, 4, 4, 1, 1]


def test_a_pause_costs_no_worker() -> None:
    assert play([(0, 0, 0), (50, 40, 9), (70, 0, 0), (120, 0, 0), (130, 0, 0)], 4) == [4, 4, 4, 4, 1]


def test_it_shrinks_to_the_most_that_was_needed_in_the_while() -> None:
    assert play([(0, 5, 2), (30, 18, 5), (60, 5, 2)], 4) == [4, 4, 2]


def test_the_least_is_there_at_once() -> None:
    assert Autoscaler(ScalingConfig(2, 4)).decide(0.0, 0.0, 0, 0) == 2

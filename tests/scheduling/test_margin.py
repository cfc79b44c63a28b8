"""The margin between the last step and the deadline, and paces that start anew."""

import pytest

from instgenie.scheduling.margin import NUM_SEEN, Margin
from instgenie.scheduling.pace import Pace


def test_nearly_all_edits_take_no_longer_than_the_margin() -> None:
    margin = Margin()
    assert margin.seconds == 0
    for seconds in range(1, 21):
        margin.measure(float(seconds))
    assert margin.seconds == 18.0
    for _ in range(NUM_SEEN):
        margin.measure(2.0)
    assert margin.seconds == 2.0  # old ones are forgotten


def test_a_pace_that_starts_anew_knows_the_ratio_and_nothing_else() -> None:
    pace = Pace()
    for _ in range(100):
        pace.measure(1.0, 7.0)
    pace.restart(3.0)
    assert pace.seconds(1, 2.0) == pytest.approx(6.0)
    assert not pace.is_measured

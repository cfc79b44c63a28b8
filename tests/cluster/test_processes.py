"""The time after which a process that died is started again."""

import pytest

from instgenie.cluster import processes
from instgenie.cluster.processes import FIRST_BACK_OFF, HEALTHY_SECONDS, LAST_BACK_OFF, MAX_FAILED_STARTS, Process


def test_restarts_come_later_each_time_and_at_once_again_after_a_healthy_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    process = Process(0, "denoise", "cpu", max_held=8)
    waits = [process.back_off() for _ in range(12)]
    assert waits[:4] == [FIRST_BACK_OFF, 2 * FIRST_BACK_OFF, 4 * FIRST_BACK_OFF, 8 * FIRST_BACK_OFF]
    assert waits[-1] == LAST_BACK_OFF
    process.succeed()
    now = HEALTHY_SECONDS + 1
    assert process.back_off() == FIRST_BACK_OFF


def test_a_long_start_is_no_healthy_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails after minutes of loading is started again with growing pauses."""
    now = 0.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    process = Process(0, "denoise", "cpu", max_held=8)
    waits = []
    for _ in range(3):
        process.begin()
        now += HEALTHY_SECONDS + 1
        process.end("it ran out of memory")
        waits.append(process.back_off())
    assert waits == [FIRST_BACK_OFF, 2 * FIRST_BACK_OFF, 4 * FIRST_BACK_OFF]


def test_a_process_is_broken_after_failed_starts_in_a_row_until_it_is_ready() -> None:
    process = Process(0, "denoise", "cpu", max_held=8)
    for _ in range(MAX_FAILED_STARTS):
        assert not process.is_broken
        process.begin()
        process.end("it died")
    assert process.is_broken
    process.begin()
    assert process.is_broken
    process.succeed()
    process.end("it was killed")
    assert not process.is_broken

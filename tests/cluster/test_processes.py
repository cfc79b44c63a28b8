"""The time after which a process that died is started again."""

import pytest

from instgenie.cluster import processes
from instgenie.cluster.processes import FIRST_BACK_OFF, HEALTHY_SECONDS, LAST_BACK_OFF, Process


def test_restarts_come_later_each_time_and_at_once_again_after_a_healthy_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    process = Process(0, "denoise", "cpu", max_held=8)
    waits = [process.back_off() for _ in range(12)]
    assert waits[:4] == [FIRST_BACK_OFF, 2 * FIRST_BACK_OFF, 4 * FIRST_BACK_OFF, 8 * FIRST_BACK_OFF]
    assert waits[-1] == LAST_BACK_OFF
    process.started_at, now = 0.0, HEALTHY_SECONDS + 1
    assert process.back_off() == FIRST_BACK_OFF

"""Registrations that failed, and when each may be tried again: the pauses grow with each failure in a row. Knows names
only."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

FIRST_PAUSE, LAST_PAUSE = 10.0, 600.0  # seconds
MAX_REMEMBERED = 1000  # the oldest failures are forgotten first


class Failure(NamedTuple):
    num_failures: int  # in a row
    retry_at: float


class Retries:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, Failure] = OrderedDict()

    def failed(self, name: str) -> None:
        num_failures = self._failures.pop(name, Failure(0, 0.0)).num_failures + 1
        pause = min(FIRST_PAUSE * 2.0 ** (num_failures - 1), LAST_PAUSE)
        self._failures[name] = Failure(num_failures, self._clock() + pause)
        if len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)

    def may_try(self, name: str) -> bool:
        failure = self._failures.get(name)
        return failure is None or self._clock() >= failure.retry_at

"""Simulated time: what is to happen, the earliest first; of what happens at one time, in the order it was foreseen."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, time: float, happen: Callable[[Any], None], what: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, happen, what))

    def run(self) -> None:
        """Until nothing more is to happen."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, happen, what = pop(events)
            happen(what)

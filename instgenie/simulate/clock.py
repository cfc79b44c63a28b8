"""Simulated time: events run in the order of their times, and those of one time in the order they were added."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call `action(argument)` at the given time."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, action, argument))

    def run(self) -> None:
        """Run all events, and those they add, until none is left."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, action, argument = pop(events)
            action(argument)

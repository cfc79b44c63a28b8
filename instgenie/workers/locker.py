"""Requests and answers that fronts leave with a worker for other fronts to collect. Knows names and bytes. It keeps a
number of bytes for a number of seconds; the oldest go first."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from instgenie.cluster.wire import Frame


class Locker:
    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.seconds, self.clock = max_bytes, seconds, clock
        self._kept: OrderedDict[str, tuple[Sequence[Frame], float]] = OrderedDict()
        self._num_bytes = 0

    def put(self, name: str, frames: Sequence[Frame]) -> None:
        self._drop(name)
        self._kept[name] = frames, self.clock() + self.seconds
        self._num_bytes += size(frames)
        self._drop_old()

    def get(self, name: str) -> Sequence[Frame] | None:
        self._drop_old()
        kept = self._kept.get(name)
        return kept[0] if kept else None

    def _drop(self, name: str) -> None:
        if kept := self._kept.pop(name, None):
            self._num_bytes -= size(kept[0])

    def _drop_old(self) -> None:
        while self._kept:
            name, (_, until) = next(iter(self._kept.items()))
            if self._num_bytes <= self.max_bytes and self.clock() < until:
                return
            self._drop(name)


def size(frames: Sequence[Frame]) -> int:
    return sum(map(len, frames))

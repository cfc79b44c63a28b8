"""What a process keeps for fronts that ask later: latents, requests, answers. Knows names and sizes. It keeps a number
of bytes for a number of seconds; the oldest go first."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Deposited(NamedTuple, Generic[T]):
    thing: T
    num_bytes: int
    until: float


class Locker(Generic[T]):
    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.seconds, self.clock = max_bytes, seconds, clock
        self._kept: OrderedDict[str, Deposited[T]] = OrderedDict()
        self._num_bytes = 0

    @property
    def names(self) -> list[str]:
        """The oldest first."""
        self._drop_old()
        return list(self._kept)

    def put(self, name: str, thing: T, num_bytes: int) -> None:
        self._drop(name)
        self._kept[name] = Deposited(thing, num_bytes, self.clock() + self.seconds)
        self._num_bytes += num_bytes
        self._drop_old()

    def get(self, name: str) -> T | None:
        self._drop_old()
        kept = self._kept.get(name)
        return kept.thing if kept else None

    def _drop(self, name: str) -> None:
        if kept := self._kept.pop(name, None):
            self._num_bytes -= kept.num_bytes

    def _drop_old(self) -> None:
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if self._num_bytes <= self.max_bytes and self.clock() < oldest.until:
                return
            self._drop(name)

"""Moves of templates between tiers: a template that is being forgotten does not move, and forgetting waits for the
moves under way. Knows keys; moves nothing itself."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from instgenie.jobs.activations import Key


class Moves:
    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards the two below; never held while data moves
        self._moving: Counter[Key] = Counter()
        self._forgetting: Counter[Key] = Counter()

    def may_move(self, key: Key) -> bool:
        return not self._forgetting[key]

    @contextlib.contextmanager
    def moving(self, key: Key) -> Iterator[bool]:
        """Yield whether a template may move: not while it is being forgotten, which waits until the block ends."""
        with self.changed:
            may_move = self.may_move(key)
            self._moving[key] += may_move
        try:
            yield may_move
        finally:
            with self.changed:
                self._moving[key] -= may_move
                self._moving += Counter()  # drops zeros
                self.changed.notify_all()

    @contextlib.contextmanager
    def forgetting(self, key: Key, is_loading: Callable[[], bool]) -> Iterator[None]:
        """Let no move of a template start until the block ends, and begin the block when none is under way."""
        with self.changed:
            self._forgetting[key] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not is_loading() and not self._moving[key])
        try:
            yield
        finally:
            with self.changed:
                self._forgetting[key] -= 1
                self._forgetting += Counter()  # drops zeros

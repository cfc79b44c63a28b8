"""Expiry of templates that nobody asked for and nobody used for a while. Knows times."""

import threading
import time

from instgenie.cache.ladder import Ladder
from instgenie.jobs.activations import Key


class Expiry:
    """Remembers uses by this process. Lasting tiers know the uses by others, too."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self.is_on = False  # uses are remembered only if templates expire
        self._used: dict[Key, float] = {}  # time of the last use, of templates that were used since the last sweep
        self._asked: set[Key] = set()
        self._lock = threading.Lock()

    def use(self, key: Key) -> None:
        if self.is_on:
            with self._lock:
                self._used[key] = time.time()

    def ask_for(self, key: Key) -> None:
        """Keep a template from expiring, because a client asked for it."""
        if self.is_on:
            with self._lock:
                self._asked.add(key)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._asked.discard(key)
            self._used.pop(key, None)

    def sweep(self, before: float) -> set[str]:
        """Remove the templates that no client asked for and nobody has used since a time. Return their names."""
        self._tell(before)
        gone = {name for tier in self.ladder.lasting for name in tier.expire(before)}
        for tier in self.ladder.memory:
            gone |= {key.name for key in tier.all() if self._may_go(key) and tier.expire(key)}
        return gone

    def _tell(self, before: float) -> None:
        """Tell lasting tiers which templates this process has used since a time, and forget older uses."""
        with self._lock:
            self._used = {key: used for key, used in self._used.items() if used >= before}
            used = list(self._used)
        for key in used:
            for tier in self.ladder.lasting:
                tier.touch(key)

    def _may_go(self, key: Key) -> bool:
        """Return whether a template has expired, as far as this process knows."""
        with self._lock:
            return key not in self._used and key not in self._asked

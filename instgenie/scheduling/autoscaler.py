"""How many workers a cluster should have, by the predicted seconds of the work that it has accepted. Arithmetic over
plain numbers: no clock, no processes.

More workers are asked for when the work would keep the present ones busy for longer than the target; fewer when a
smaller number would have done for a while. So a burst is answered within seconds, and a pause costs no worker.
"""

import math
from dataclasses import dataclass

RISE_SECONDS = 2.0  # for which more workers have to be needed: one long edit that is nearly done asks for none


@dataclass(frozen=True)
class ScalingConfig:
    min_workers: int
    max_workers: int
    queue_seconds: float = 10.0  # of predicted work per worker, above which more workers are wanted
    idle_seconds: float = 60.0  # for which fewer workers have to suffice before one is given up


class Autoscaler:
    def __init__(self, config: ScalingConfig) -> None:
        self.config = config
        self._more_since: float | None = None  # None: the present number suffices
        self._fewer_since: float | None = None  # None: the present number is needed
        self._most = 0  # workers needed at one time since then

    def needed(self, seconds: float, num_edits: int) -> int:
        """The workers that do this work within the target. An edit runs on one worker, so no more than edits."""
        wanted = min(math.ceil(seconds / self.config.queue_seconds), num_edits)
        return min(max(wanted, self.config.min_workers), self.config.max_workers)

    def decide(self, now: float, seconds: float, num_edits: int, num_workers: int) -> int:
        """The number of workers to have, given the accepted edits, the predicted seconds of all their work on one
        worker, and the present number."""
        needed = self.needed(seconds, num_edits)
        if num_workers < self.config.min_workers:
            return needed
        if needed > num_workers:
            self._fewer_since = None
            self._more_since = now if self._more_since is None else self._more_since
            return needed if now - self._more_since >= RISE_SECONDS else num_workers
        self._more_since = None
        if needed == num_workers:
            self._fewer_since = None
            return num_workers
        if self._fewer_since is None:
            self._fewer_since, self._most = now, needed
        self._most = max(self._most, needed)
        if now - self._fewer_since < self.config.idle_seconds:
            return num_workers
        self._fewer_since = None
        return self._most

"""Tells clients and observers what happens to edits, and counts it."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from instgenie.cluster.entries import EditEntry
from instgenie.cluster.orders import Facts, FailureKind, Partial, Queued, Stepped
from instgenie.cluster.status import Observer
from instgenie.pictures.digest import masked_share
from instgenie.telemetry import traces
from instgenie.types import TierName


class Reporter:
    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.counts: Counter[str] = Counter()
        self.cache_hits: Counter[TierName] = Counter()
        self._queried: set[str] = set()  # edits whose cache query is counted
        self._positions: dict[str, int] = {}  # in the queue, as each client was last told

    def accepted(self, entry: EditEntry) -> None:
        for observer in self.observers:
            observer.accepted(masked_share(entry.order.mask))

    def cache_query(self, entry: EditEntry) -> None:
        """Count an edit once, however often it is run."""
        if entry.id in self._queried:
            return
        self._queried.add(entry.id)
        self.counts["queries"] += 1
        if entry.tier:
            self.cache_hits[entry.tier] += 1
        for observer in self.observers:
            observer.cache_query(entry.tier)

    def fetched(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        for observer in self.observers:
            observer.fetched(tier, num_bytes, seconds)

    def lora_loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        for observer in self.observers:
            observer.lora_loaded(tier, num_bytes, seconds)

    def waited(self, entry: EditEntry, stage: str, worked: float = 0.0) -> None:
        """Trace how long an edit waited for a stage, which began `worked` seconds ago."""
        now = time.monotonic()
        facts = {"stage": stage, "worker": entry.worker, "attempt": entry.attempt}
        traces.record(entry.order.trace, "queue", now - entry.waits_from - worked, worked, **facts)
        entry.waits_from = now

    def joined(self, entry: EditEntry) -> None:
        for observer in self.observers:
            observer.joined(entry.worker, entry.status())

    def left(self, entry: EditEntry) -> None:
        for observer in self.observers:
            observer.left(entry.worker, entry.id)

    def preempted(self, entry: EditEntry, by: str) -> None:
        for observer in self.observers:
            observer.preempted(entry.worker, entry.id, by)

    def batch_stepped(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        for observer in self.observers:
            observer.step(worker, seconds, batch_size, between)

    def stepped(self, entry: EditEntry, seconds_left: float | None) -> None:
        entry.events.put_nowait(Stepped(entry.step, entry.num_steps, seconds_left))

    def partial(self, entry: EditEntry, index: int, picture: bytes) -> None:
        entry.events.put_nowait(Partial(index, picture))

    def positions(self, entries: Iterable[EditEntry], left: Callable[[EditEntry], float | None]) -> None:
        """Tell each waiting edit of a worker how many edits of other requests are ahead of it there, if that has
        changed, and the time left."""
        num_ahead = 0
        num_own: Counter[int] = Counter()  # of them, those of the same request
        for entry in sorted(entries, key=lambda entry: entry.number):
            if entry.is_waiting:
                position = num_ahead - num_own[id(entry.group)]
                num_ahead += 1
                num_own[id(entry.group)] += 1
                if self._positions.get(entry.id) != position:
                    self._positions[entry.id] = position
                    entry.events.put_nowait(Queued(position, left(entry), entry.predicted))

    def finished(self, facts: Facts, seconds: float) -> None:
        self.counts["finished"] += 1
        for observer in self.observers:
            observer.finished(facts, seconds)

    def failed(self, kind: FailureKind) -> None:
        self.counts["failed"] += 1
        for observer in self.observers:
            observer.failed(kind)

    def cancelled(self) -> None:
        self.counts["cancelled"] += 1
        for observer in self.observers:
            observer.cancelled()

    def ended(self, entry: EditEntry) -> None:
        """Close the events of an edit: it was answered or cancelled."""
        self._queried.discard(entry.id)
        self._positions.pop(entry.id, None)
        entry.events.put_nowait(None)

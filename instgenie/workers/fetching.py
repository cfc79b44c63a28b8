"""Fetching of activations into memory for the jobs of a step loop. No call here waits: threads fetch, and wake the loop
when a fetch has ended."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from instgenie.cache.store import Found, Handle, Lookup, Store
from instgenie.jobs.activations import Key
from instgenie.types import TierName

MAX_ANNOUNCED = 1024  # announced jobs that are remembered

log = logging.getLogger(__name__)


class FetchOutcome(Enum):
    """Outcomes of a fetch that has not brought anything."""

    LOADING = "loading"
    ABSENT = "absent"  # no tier has it
    REFUSED = "refused"  # a tier has it, but memory has no room for it


@dataclass(eq=False)
class Fetching:
    """A template that is being brought into memory for one job."""

    key: Key
    outcome: Found | FetchOutcome = FetchOutcome.LOADING
    num_unpinned: int = -1  # pins that had ended when it was last tried

    def put_off(self) -> None:
        """Drop what has been fetched; the next call of `Fetcher.retry_if_room` fetches it again."""
        self.outcome, self.num_unpinned = FetchOutcome.REFUSED, -1


class Fetcher:
    """Fetches templates and pins those in use. Pins, unpins and fetches are done in the order they are asked for. When
    a pin has ended, the loop is woken, since a fetch that was refused may now find room."""

    def __init__(
        self, store: Store, device: torch.device, on_fetched: Callable[[Key], None], wake: Callable[[], None]
    ) -> None:
        self.store, self.device, self.on_fetched, self.wake = store, device, on_fetched, wake
        self._announced: OrderedDict[str, TierName] = OrderedDict()  # tiers in which announced jobs had activations
        self._num_pinned = 0  # pins and announced loads; counted by the loop
        self._num_unpinned = 0  # those of them that have ended; counted by the thread that pins
        self._pinner = ThreadPoolExecutor(1, "templates-pin")

    def announce(self, job: str, key: Key) -> None:
        """Start to load the activations that a job will use, and remember where they were."""
        if self.store.memory:
            self._num_pinned += 1
            self.store.prefetch(key, self.device).add_done_callback(partial(self._note_tier, job))
            while len(self._announced) > MAX_ANNOUNCED:
                self._announced.popitem(last=False)

    def where(self, job: str, found: Found) -> TierName:
        """The tier in which a job's activations were when it was announced."""
        return self._announced.pop(job, found.tier)

    def fetch(self, key: Key) -> Fetching:
        fetching = Fetching(key)
        self.retry(fetching)
        return fetching

    def retry(self, fetching: Fetching) -> None:
        """Try again, after all unpinning that was asked for before."""
        fetching.outcome, fetching.num_unpinned = FetchOutcome.LOADING, self._num_unpinned
        self._pinner.submit(self._load, fetching)

    def retry_if_room(self, fetching: Fetching) -> bool:
        """Try a refused fetch again if pins have ended since. Return whether it may still succeed: it is being tried,
        or other templates are in use and will make room."""
        is_in_use = self._num_pinned > self._num_unpinned  # read first: the other thread may end a pin meanwhile
        if fetching.num_unpinned < self._num_unpinned:
            self.retry(fetching)
            return True
        return is_in_use

    def pin(self, key: Key) -> None:
        self._num_pinned += 1
        self._pinner.submit(self.store.pin, key)

    def unpin(self, key: Key) -> None:
        self._pinner.submit(self._unpin, key)

    def drop(self, fetching: Fetching) -> None:
        """Put off a fetch that has brought its template. Fetches that were refused meanwhile may now find room."""
        fetching.put_off()
        self._num_pinned += 1
        self._pinner.submit(self._count_unpinned)

    # in threads

    def _note_tier(self, job: str, handle: Handle) -> None:
        if found := result_of(handle):
            self._announced[job] = found.tier
        self._pinner.submit(self._count_unpinned)  # the load pinned its template

    def _unpin(self, key: Key) -> None:
        self.store.unpin(key)
        self._count_unpinned()

    def _count_unpinned(self) -> None:
        self._num_unpinned += 1
        self.wake()

    def _load(self, fetching: Fetching) -> None:
        handle = self.store.prefetch(fetching.key, self.device)
        handle.add_done_callback(partial(self._loaded, fetching))

    def _loaded(self, fetching: Fetching, handle: Handle) -> None:
        found = result_of(handle)
        fetching.outcome = found or self._why_not(fetching.key)
        if found:
            self.on_fetched(fetching.key)
        self.wake()

    def _why_not(self, key: Key) -> FetchOutcome:
        return FetchOutcome.ABSENT if self.store.find(key) is Lookup.MISS else FetchOutcome.REFUSED


def result_of(handle: Handle) -> Found | None:
    """The result of a fetch; an error counts as a miss."""
    if error := handle.exception():
        log.error("a template was not loaded", exc_info=error)
        return None
    return handle.result()

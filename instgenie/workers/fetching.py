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


class Fetcher:
    """Fetches templates and pins those in use. Pins, unpins and fetches are done in the order they are asked for."""

    def __init__(
        self, store: Store, device: torch.device, on_fetched: Callable[[Key], None], wake: Callable[[], None]
    ) -> None:
        self.store, self.device, self.on_fetched, self.wake = store, device, on_fetched, wake
        self._announced: OrderedDict[str, TierName] = OrderedDict()  # tiers in which announced jobs had activations
        self._num_unpinned = 0
        self._pinner = ThreadPoolExecutor(1, "templates-pin")

    def announce(self, job: str, key: Key) -> None:
        """Start to load the activations that a job will use, and remember where they were."""
        if self.store.memory:
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
        fetching.outcome = FetchOutcome.LOADING
        self._pinner.submit(self._load, fetching, self._num_unpinned)

    def pin(self, key: Key) -> None:
        self._pinner.submit(self.store.pin, key)

    def unpin(self, key: Key) -> None:
        self._num_unpinned += 1
        self._pinner.submit(self.store.unpin, key)

    # in threads

    def _note_tier(self, job: str, handle: Handle) -> None:
        if found := result_of(handle):
            self._announced[job] = found.tier

    def _load(self, fetching: Fetching, num_unpinned: int) -> None:
        handle = self.store.prefetch(fetching.key, self.device)
        handle.add_done_callback(partial(self._loaded, fetching, num_unpinned))

    def _loaded(self, fetching: Fetching, num_unpinned: int, handle: Handle) -> None:
        found = result_of(handle)
        outcome = found or self._why_not(fetching.key)
        if outcome is FetchOutcome.REFUSED and num_unpinned < self._num_unpinned:
            self.retry(fetching)  # room was made meanwhile
            return
        fetching.outcome = outcome
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

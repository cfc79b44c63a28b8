"""The store as a step loop sees it: nothing here waits. What takes time is done in threads; the loop is woken and hears
of it when it next looks. Knows templates by their keys; no job.

The `picture` of a key is the template's id, which is made of the picture.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.store import Found, Handle, Lookup, Store
from instgenie.cluster.config import CacheConfig
from instgenie.cluster.orders import Tier
from instgenie.cluster.wire import (
    Forgotten,
    Frame,
    Kept,
    Listed,
    Listing,
    Message,
    Recalled,
    TemplateHead,
    picture_frames,
)
from instgenie.jobs.activations import Key
from instgenie.machine.device import available_bytes
from instgenie.types import Pixels

MAX_FORESEEN = 1024  # jobs that are yet to come

log = logging.getLogger(__name__)


class Outcome(Enum):
    """Of a fetch that has found nothing."""

    LOADING = "loading"  # yet
    ABSENT = "absent"
    REFUSED = "refused"  # it is there, and memory has no room for it


@dataclass(eq=False)
class Fetching:
    """A template on its way up for one job."""

    key: Key
    outcome: Found | Outcome = Outcome.LOADING


class Templates:
    def __init__(self, store: Store, device: torch.device, wake: Callable[[], None]) -> None:
        self.store, self.device, self.wake = store, device, wake
        self._told: SimpleQueue[tuple[Message, Sequence[Frame]]] = SimpleQueue()  # what the loop is to send
        self._changed: SimpleQueue[Key] = SimpleQueue()  # templates that came to a tier, or left one
        self._foreseen: OrderedDict[str, Tier] = OrderedDict()  # where the activations of jobs to come were
        self._reported: dict[Key, dict[Tier, int]] = {}
        self._num_unpinned = 0
        self._pinner = ThreadPoolExecutor(1, "templates-pin")
        self._clerk = ThreadPoolExecutor(1, "templates-clerk")
        self._lister = ThreadPoolExecutor(1, "templates-list")  # a long list takes its time
        store.on_evict = lambda _, key: self._changed.put(key)
        self._later(self._clerk, self._report, None)

    # on their way up

    def foresee(self, job: str, key: Key) -> None:
        """Starts to load what a job will ask for, and remembers where it was."""
        if self.store.memory:
            self.store.prefetch(key, self.device).add_done_callback(partial(self._foresaw, job))
            while len(self._foreseen) > MAX_FORESEEN:
                self._foreseen.popitem(last=False)

    def where(self, job: str, found: Found) -> Tier:
        """The tier in which a job's activations were when it was queued."""
        return self._foreseen.pop(job, found.tier)

    def fetch(self, key: Key) -> Fetching:
        fetching = Fetching(key)
        self.retry(fetching)
        return fetching

    def retry(self, fetching: Fetching) -> None:
        """Behind whatever is to be unpinned first."""
        fetching.outcome = Outcome.LOADING
        self._pinner.submit(self._load, fetching, self._num_unpinned)

    def pin(self, key: Key) -> None:
        self._pinner.submit(self.store.pin, key)

    def unpin(self, key: Key) -> None:
        self._num_unpinned += 1
        self._pinner.submit(self.store.unpin, key)

    # the rest

    def missing(self, key: Key) -> Future[list[range]]:
        """The spans that no tier has. Memory answers at once."""
        future: Future[list[range]] = Future()
        if self.store.tiers == self.store.memory:
            future.set_result(self.store.missing(key))
        else:
            future = self._clerk.submit(self.store.missing, key)
            future.add_done_callback(lambda _: self.wake())
        return future

    def memory_bytes(self, key: Key) -> dict[Tier, int]:
        return {tier.name: num_bytes for tier in self.store.memory if (num_bytes := tier.num_bytes(key))}

    def forget(self, key: Key) -> None:
        self._later(self._clerk, self._forget, key)

    def report(self, key: Key) -> None:
        """Tells what has become of the template, and of those that made room for it."""
        self._later(self._clerk, self._report, key)

    def keep_picture(self, key: Key, picture: Pixels) -> None:
        """Beside the activations, when they are written."""
        self._later(self._clerk, self._keep_picture, key, picture)

    def recall(self, key: Key) -> None:
        self._later(self._clerk, self._recall, key)

    def list_all(self, model: str, make_key: Callable[[TemplateHead], Key]) -> None:
        """Those of the model whose key is made of what a head says."""
        self._later(self._lister, self._list, model, make_key)

    def told(self) -> Iterator[tuple[Message, Sequence[Frame]]]:
        while True:
            try:
                yield self._told.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Finishes what must not be lost: what is to be written, and what is to be forgotten."""
        self._lister.shutdown(wait=False, cancel_futures=True)
        self._clerk.shutdown()
        self.store.settle()

    # in threads

    def _foresaw(self, job: str, handle: Handle) -> None:
        if found := result_of(handle):
            self._foreseen[job] = found.tier

    def _load(self, fetching: Fetching, num_unpinned: int) -> None:
        handle = self.store.prefetch(fetching.key, self.device)
        handle.add_done_callback(partial(self._loaded, fetching, num_unpinned))

    def _loaded(self, fetching: Fetching, num_unpinned: int, handle: Handle) -> None:
        found = result_of(handle)
        outcome = found or self._why_not(fetching.key)
        if outcome is Outcome.REFUSED and num_unpinned < self._num_unpinned:
            self.retry(fetching)  # others have made room meanwhile
            return
        fetching.outcome = outcome
        if found and self._reported.get(fetching.key) != self.memory_bytes(fetching.key):
            self.report(fetching.key)
        self.wake()

    def _why_not(self, key: Key) -> Outcome:
        return Outcome.ABSENT if self.store.find(key) is Lookup.MISS else Outcome.REFUSED

    def _forget(self, key: Key) -> None:
        self.store.forget(key)
        self._tell(Forgotten(key.picture))
        self._report(key)

    def _report(self, key: Key | None) -> None:
        self.store.settle()  # and with what is written, others may go
        changed = {key} if key else set()
        while not self._changed.empty():
            changed.add(self._changed.get())
        tier_bytes: dict[Tier, int] = {name: status.num_bytes for name, status in self.store.status().items()}
        self._tell(Kept(None, {}, tier_bytes))
        for one in changed:
            self._reported[one] = self.memory_bytes(one)
            template_bytes = {tier.name: num for tier in self.store.tiers if (num := tier.num_bytes(one))}
            self._tell(Kept(one.picture, template_bytes, tier_bytes))

    def _keep_picture(self, key: Key, picture: Pixels) -> None:
        self.store.settle()
        self.store.put_picture(key, picture)

    def _recall(self, key: Key) -> None:
        picture = self.store.picture(key)
        if picture is None:
            self._tell(Recalled(key.picture, None))
        else:
            height, width, _ = picture.shape
            self._tell(Recalled(key.picture, (height, width)), picture_frames(picture))

    def _list(self, model: str, make_key: Callable[[TemplateHead], Key]) -> None:
        listings = []
        for key, size in self.store.pictures().items():
            head = head_of(key)
            if key.model == model and make_key(head) == key:
                num_missing = sum(map(len, self.store.missing(key)))
                in_tiers = {tier.name: num for tier in self.store.lasting if (num := tier.num_bytes(key))}
                listings.append(Listing(head, size, key.num_steps - num_missing, in_tiers))
        self._tell(Listed(model, tuple(listings)))

    def _tell(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        self._told.put((message, frames))
        self.wake()

    def _later(self, thread: ThreadPoolExecutor, work: Callable[..., None], *given: Any) -> None:
        thread.submit(work, *given).add_done_callback(log_error)


def head_of(key: Key) -> TemplateHead:
    return TemplateHead(key.picture, key.tenant, key.model, key.size, key.num_steps, key.guidance)


def result_of(handle: Handle) -> Found | None:
    """What goes wrong on the way is a miss."""
    if error := handle.exception():
        log.error("a template was not loaded", exc_info=error)
        return None
    return handle.result()


def log_error(future: Future[None]) -> None:
    if error := future.exception():
        log.error("a chore failed", exc_info=error)


def open_store(config: CacheConfig, device: torch.device) -> Store:
    """The tiers that have any room. Raises a CacheError for a folder or a URL that cannot be used."""
    assert config.host_bytes is not None  # the cluster has chosen it
    gpu_bytes = choose_gpu_bytes(config, device)
    return Store(
        gpu=GpuTier(device, gpu_bytes) if gpu_bytes else None,
        host=HostTier(config.host_bytes) if config.host_bytes else None,
        disk=DiskTier(Path(config.disk), config.disk_bytes) if config.disk else None,
        remote=RemoteTier(config.remote, config.remote_bytes) if config.remote else None,
    )


def choose_gpu_bytes(config: CacheConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(available_bytes(device) / 2) if config.gpu_bytes is None else config.gpu_bytes

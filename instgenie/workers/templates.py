"""The store as a step loop uses it: no call here waits. Threads do what takes time; they wake the loop, which then
sends what they report. Knows templates by their keys, and no jobs."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import zmq
from rich.filesize import decimal

from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.peers import PeerTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.sharing import PeerServer
from instgenie.cache.store import Store
from instgenie.cluster.config import ResolvedCache
from instgenie.cluster.wire import (
    Fetched,
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
from instgenie.machine.curve import cluster_secret
from instgenie.types import TierName
from instgenie.workers.fetching import Fetcher, FetchOutcome
from instgenie.workers.keys import Keys

NUM_REMOVERS = 4  # templates that are forgotten at once
LONGEST_WAIT = 600.0  # seconds between two looks for templates that have expired

log = logging.getLogger(__name__)


class Templates:
    def __init__(
        self,
        store: Store,
        device: torch.device,
        keys: Keys,
        wake: Callable[[], None],
        seconds_to_live: float | None = None,
    ) -> None:
        self.store, self.keys, self.wake = store, keys, wake
        self.fetcher = Fetcher(store, device, self.report_if_changed, wake)
        self._reports: SimpleQueue[tuple[Message, Sequence[Frame]]] = SimpleQueue()  # for the loop to send
        self._evicted: SimpleQueue[Key] = SimpleQueue()
        self._reported: dict[Key, dict[TierName, int]] = {}  # bytes in memory as last reported
        self._clerk = ThreadPoolExecutor(1, "templates-clerk")
        # apart, because each may take a while
        self._lister = ThreadPoolExecutor(1, "templates-list")
        self._reader = ThreadPoolExecutor(1, "templates-read")
        self._remover = ThreadPoolExecutor(NUM_REMOVERS, "templates-remove")
        self._closed = threading.Event()
        store.on_evict = lambda _, key: self._evicted.put(key)
        store.writer.on_written = self._written
        store.loads.on_loaded = lambda tier, num_bytes, seconds: self._send(Fetched(tier, num_bytes, seconds))
        self._later(self._clerk, self._report, None)
        if seconds_to_live is not None:
            store.expiry.is_on = True
            threading.Thread(target=self._sweep, args=(seconds_to_live,), daemon=True).start()

    # requests

    def find(self, head: TemplateHead, peers: Sequence[str]) -> Key:
        """The key of a template that a job uses. `peers` are the addresses of workers that have it in memory now."""
        key = self.keys.find(head)
        if self.store.peers:
            self.store.peers.learn(key, peers)
        return key

    def missing(self, key: Key) -> Future[list[range]]:
        """The spans that no tier has. The result is immediate if all tiers are in memory."""
        future: Future[list[range]] = Future()
        if self.store.tiers == self.store.memory:
            future.set_result(self.store.missing(key))
        else:
            future = self._clerk.submit(self.store.missing, key)
            future.add_done_callback(lambda _: self.wake())
        return future

    def memory_bytes(self, key: Key) -> dict[TierName, int]:
        return {tier.name: num_bytes for tier in self.store.memory if (num_bytes := tier.num_bytes(key))}

    def why_not(self, outcome: FetchOutcome) -> str:
        """Why activations are not used, as a clause for the client."""
        if outcome is FetchOutcome.ABSENT:
            return "no activations are registered for the picture with these steps and this guidance"
        num_bytes = decimal(sum(tier.max_bytes for tier in self.store.memory))
        return f"the worker's memory, which may hold {num_bytes} of activations, has no room for those of its template"

    def forget(self, key: Key) -> None:
        self._later(self._remover, self._forget, key)

    def ask_for(self, key: Key) -> None:
        """Keep a template that a client asked for from expiring."""
        self.store.ask_for(key)

    def report(self, key: Key) -> None:
        """Report the tiers of the template, and of those that were evicted to make room for it; once more when a
        lasting tier has taken it."""
        self._reported.setdefault(key, {})
        self._later(self._clerk, self._report, key)

    def report_if_changed(self, key: Key) -> None:
        if self._reported.get(key) != self.memory_bytes(key):
            self.report(key)

    def recall(self, key: Key) -> None:
        self._later(self._reader, self._recall, key)

    def list_all(self, model: str) -> None:
        """List the templates of a model, by the digest of its weights, that this worker could use."""
        self._later(self._lister, self._list, model)

    def reports(self) -> Iterator[tuple[Message, Sequence[Frame]]]:
        """Messages that threads want to be sent."""
        while True:
            try:
                yield self._reports.get_nowait()
            except Empty:
                return

    def close(self) -> Future[None]:
        """Finish all writing and forgetting, in a thread; give up listing and reading."""
        self._closed.set()
        for thread in (self._lister, self._reader):
            thread.shutdown(wait=False, cancel_futures=True)
        return ThreadPoolExecutor(1, "templates-close").submit(self._close)

    # in threads

    def _close(self) -> None:
        self._remover.shutdown()
        self.store.settle()
        self._clerk.shutdown()
        self.store.writer.close()

    def _forget(self, key: Key) -> None:
        left = self.store.forget(key)
        self._send(Forgotten(self.keys.id(key), tuple(left)))
        self._report(key)

    def _written(self, key: Key) -> None:
        """Report a template again now that a lasting tier has it. The loop may have waited for its room in memory."""
        if key in self._reported:
            with suppress(RuntimeError):  # it is closing: nobody asks any more
                self._later(self._clerk, self._report, key)
        self.wake()

    def _report(self, key: Key | None) -> None:
        changed = {key} if key else set()
        while not self._evicted.empty():
            changed.add(self._evicted.get())
        self._tell(changed)

    def _tell(self, changed: set[Key]) -> None:
        """Report the tiers. Templates that are in no tier yet, but about to be written, are passed over."""
        tier_bytes: dict[TierName, int] = {name: status.num_bytes for name, status in self.store.status().items()}
        self._send(Kept(None, {}, tier_bytes))
        for one in changed:
            self._reported[one] = self.memory_bytes(one)
            template_bytes = {tier.name: num for tier in self.store.tiers_of(one) if (num := tier.num_bytes(one))}
            if not template_bytes and self.store.writer.is_pending(one):
                continue
            self._send(Kept(self.keys.id(one), template_bytes, tier_bytes))
            if not template_bytes:
                self._reported.pop(one, None)

    def _recall(self, key: Key) -> None:
        picture = self.store.picture(key)
        if picture is None:
            self._send(Recalled(self.keys.id(key), None))
        else:
            height, width, _ = picture.shape
            self._send(Recalled(self.keys.id(key), (height, width)), picture_frames(picture))

    def _list(self, model: str) -> None:
        listings = []
        for key, size in self.store.pictures().items():
            head = self.keys.head(key)
            if key.model == model and self.keys.make(head) == key:
                num_missing = key.num_served(self.store.missing(key))
                in_tiers = {tier.name: num for tier in self.store.lasting if (num := tier.num_bytes(key))}
                listings.append(Listing(head, size, key.num_steps - num_missing, in_tiers))
        self._send(Listed(model, tuple(listings), self._take_up_forgetting(model)))

    def _take_up_forgetting(self, model: str) -> tuple[TemplateHead, ...]:
        """Templates of the model that were forgotten while a tier was away, by this process or an earlier one. Those of
        other models are deleted here, if the tier is back."""
        heads = []
        for key in self.store.tombstones.all():
            head = self.keys.head(key)
            if key.model == model and self.keys.make(head) == key:
                heads.append(head)
            else:
                self.store.forget(key)
        return tuple(heads)

    def _sweep(self, seconds_to_live: float) -> None:
        """Remove templates that have expired, from time to time."""
        while not self._closed.wait(min(max(seconds_to_live / 10, 1.0), LONGEST_WAIT)):
            try:
                if gone := self.store.expiry.sweep(time.time() - seconds_to_live):
                    log.info("templates expired", extra={"num_templates": len(gone)})
                    self._later(self._clerk, self._tell, {key for key in self.keys.known() if key.name in gone})
            except Exception:
                log.exception("the sweep of the template store failed")

    def _send(self, message: Message, frames: Sequence[Frame] = ()) -> None:
        self._reports.put((message, frames))
        self.wake()

    def _later(self, thread: ThreadPoolExecutor, work: Callable[..., None], *given: Any) -> None:
        thread.submit(work, *given).add_done_callback(log_error)


def log_error(future: Future[None]) -> None:
    if error := future.exception():
        log.error("work on the template store failed", exc_info=error)


def open_store(config: ResolvedCache, device: torch.device, has_peers: bool = False) -> Store:
    """Open the tiers that have any room; a GPU tier needs a CUDA device and a size. Raises a CacheError for a folder or
    a URL that cannot be used. `has_peers`: other workers may have templates in memory."""
    gpu_bytes = config.gpu_bytes if device.type == "cuda" else 0
    return Store(
        gpu=GpuTier(device, gpu_bytes) if gpu_bytes else None,
        host=HostTier(config.host_bytes) if config.host_bytes else None,
        disk=DiskTier(Path(config.disk), config.disk_bytes) if config.disk else None,
        remote=RemoteTier(config.remote, config.remote_bytes) if config.remote else None,
        peers=PeerTier(config.host_bytes + (gpu_bytes or 0), cluster_secret()) if has_peers else None,
    )


def serve_peers(store: Store, address: str, bytes_per_second: float) -> PeerServer | None:
    """Serve the templates in memory to peers, if an address is given and can be bound."""
    if not address or not store.memory:
        return None
    try:
        return PeerServer(address, store.memory[::-1], bytes_per_second, cluster_secret())
    except zmq.ZMQError as error:
        log.warning("no peer is served", extra={"address": address, "reason": str(error)})
        return None

"""The store: one place to ask for a template's activations, over a ladder of tiers. Decides when templates move and
makes sure that a move happens once; `ladder` knows how they move.

A template that is asked for is brought up into memory by a thread of the store, once for all callers that ask
meanwhile. A template that a tier evicts goes to the next tier below that takes it, unless a lower tier has it already.
New spans are put into memory first and written to disk behind that: a process that dies loses only what it had not
written yet.

A failure in a tier never reaches the caller: it is logged and counts as a miss.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch

from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.ladder import Ladder
from instgenie.cache.remote import RemoteTier
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.device_memory import memory_guard
from instgenie.types import Pixels, TierName

CPU = torch.device("cpu")
NUM_LOADERS = 4  # templates that are brought up at once

logger = logging.getLogger(__name__)


class Lookup(Enum):
    MISS = "miss"  # no tier has it, or only some of its spans are anywhere
    PENDING = "pending"  # it is below memory, or on its way up
    HIT = "hit"  # it is in memory


@dataclass(frozen=True, eq=False)
class Found:
    """All steps of a template, and the lowest tier that was needed when it was asked for."""

    span: Span
    tier: TierName


Handle: TypeAlias = Future[Found | None]  # None is a miss


@dataclass(frozen=True)
class TierStatus:
    num_templates: int
    num_bytes: int
    max_bytes: int
    num_hits: int  # templates that were found here and no higher
    num_evictions: int


class Store:
    """All methods are thread-safe. A tier belongs to one store. `on_evict` is called with each template that is about
    to leave a tier."""

    def __init__(
        self,
        gpu: GpuTier | None = None,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        on_evict: Callable[[TierName, Key], None] | None = None,
    ) -> None:
        self.gpu, self.host, self.disk, self.remote = gpu, host, disk, remote
        self.ladder = Ladder(gpu, host, disk, remote)
        self.memory, self.lasting, self.tiers = self.ladder.memory, self.ladder.lasting, self.ladder.tiers
        self.on_evict = on_evict
        for index, tier in enumerate(self.tiers):
            tier.spill = partial(self._before_eviction, index)
        self._hits: Counter[TierName] = Counter()
        self._pins: dict[Key, tuple[int, contextlib.ExitStack]] = {}
        self._loading: dict[tuple[Key, torch.device], Handle] = {}
        self._in_use: WeakValueDictionary[tuple[Key, torch.device], Span] = WeakValueDictionary()
        self._spilling: Counter[Key] = Counter()
        self._forgetting: set[Key] = set()
        self._lock = threading.Condition()  # guards the six above; never held while data moves
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, "store-load")
        self._writer = ThreadPoolExecutor(1, "store-write")

    @property
    def is_empty(self) -> bool:
        """True if memory holds no template and there is no tier below it."""
        return self.tiers == self.memory and not any(tier.usage().num_templates for tier in self.memory)

    def find(self, key: Key) -> Lookup:
        """Ask where a template is. Only if no other tier has it, this waits for the remote tier's answer."""
        if self.ladder.is_in_memory(key):
            return Lookup.HIT
        with self._lock:
            if self._is_loading(key):
                return Lookup.PENDING
        return Lookup.PENDING if self.ladder.source(key) else Lookup.MISS

    def missing(self, key: Key) -> list[range]:
        """The spans that are in no tier."""
        return self.ladder.missing(key, key.spans, self.tiers)

    def num_bytes(self, key: Key) -> int:
        """Bytes in the lowest tier that is needed to have all of the template; 0 if the template is not whole."""
        source = self.ladder.source(key)
        return source.num_bytes(key) if source else 0

    # upwards

    def prefetch(self, key: Key, device: torch.device = CPU) -> Handle:
        """Start to bring a template up unless that is under way, without waiting. It comes to lie on the device if the
        gpu tier has room, else in main memory. Without tiers in memory it stays on the device as long as a caller holds
        the span."""
        with self._lock:
            handle = self._loading.get((key, device)) or self._at_hand(key, device)
            if not handle:
                handle = self._loading[key, device] = self._loaders.submit(self._bring, key, device)
        handle.add_done_callback(partial(self._loaded, key, device))
        return handle

    def get(self, key: Key, device: torch.device = CPU) -> Found | None:
        """Prefetch, and wait for the result."""
        return self.prefetch(key, device).result()

    def _is_loading(self, key: Key) -> bool:
        return any(key == loading for loading, _ in self._loading)

    def _at_hand(self, key: Key, device: torch.device) -> Handle | None:
        """A finished handle if nothing has to move: the template is as far up as it gets, or is being forgotten."""
        if key in self._forgetting:
            return done(None)
        tier = next(iter(self.ladder.memory_for(device)), None)
        span = tier.load(key, key.steps) if tier else self._in_use.get((key, device))
        return done(Found(span, tier.name if tier else memory_name(device))) if span else None

    def _bring(self, key: Key, device: torch.device) -> Found | None:
        """Bring a template up, in a thread of its own; a failure is a miss."""
        try:
            with self.pinned(key), memory_guard("the template"):
                source = self.ladder.source(key)
                span = self.ladder.lift(key, device) if source else None
        except (CacheError, OutOfMemoryError) as error:
            logger.warning("the template's activations are not used: %s", error)
            return None
        if not source or not span:
            return None
        if not self.ladder.memory_for(device):
            self._in_use[key, device] = span
        return Found(span, source.name)

    def _loaded(self, key: Key, device: torch.device, handle: Handle) -> None:
        with self._lock:
            if self._loading.get((key, device)) is handle:
                del self._loading[key, device]
                self._lock.notify_all()
            if not handle.exception() and (found := handle.result()):
                self._hits[found.tier] += 1

    # downwards

    def put(self, key: Key, span: Span) -> None:
        """Keep a span of a registration. Raise a CacheError if no tier has room for the template."""
        tiers = self.tiers[1:] if self.gpu and self.host else self.tiers  # the gpu tier is for what is asked for
        tier = self.ladder.sink(key, span, tiers)
        if self.disk and tier in self.memory:
            otherwise = f"stays in the {tier.name} tier alone"
            self._writer.submit(self._spill, key, self.tiers.index(tier), otherwise)

    def _before_eviction(self, index: int, key: Key) -> None:
        name = self.tiers[index].name
        self._spill(key, index, f"leaves the {name} tier and is lost")
        if self.on_evict:
            self.on_evict(name, key)

    def _spill(self, key: Key, index: int, otherwise: str) -> None:
        """Copy a template from one tier to those below; `otherwise` is the log message for a failure."""
        try:
            with self._moving(key) as may_move:
                if may_move:
                    self.ladder.send_down(key, index)
        except CacheError as error:
            logger.warning("a template %s: %s", otherwise, error)

    @contextlib.contextmanager
    def _moving(self, key: Key) -> Iterator[bool]:
        """Yield whether a template may move down: not while it is being forgotten. `forget` waits until the block
        ends."""
        with self._lock:
            may_move = key not in self._forgetting
            self._spilling[key] += may_move
        try:
            yield may_move
        finally:
            with self._lock:
                self._spilling[key] -= may_move
                self._spilling += Counter()  # drops zeros
                self._lock.notify_all()

    # pictures

    def put_picture(self, key: Key, picture: Pixels) -> None:
        """Keep the template's picture in a lasting tier, if there is room. It is removed with the template."""
        with self._moving(key) as may_move:
            if may_move:
                self.ladder.sink_picture(key, picture, self.lasting)

    def picture(self, key: Key) -> Pixels | None:
        return next((found for tier in self.lasting if (found := tier.load_picture(key)) is not None), None)

    def pictures(self) -> dict[Key, tuple[int, int]]:
        """The (height, width) of every picture that was put, by this process or another."""
        return {key: size for tier in reversed(self.lasting) for key, size in tier.pictures().items()}

    # pins

    def pin(self, key: Key) -> None:
        """Keep the template in every tier that has it, or will have it, until it is unpinned as often."""
        with self._lock:
            num, stack = self._pins.get(key) or (0, self.ladder.pin(key))
            self._pins[key] = num + 1, stack

    def unpin(self, key: Key) -> None:
        with self._lock:
            num, stack = self._pins.pop(key)
            if num > 1:
                self._pins[key] = num - 1, stack
                return
        stack.close()

    @contextlib.contextmanager
    def pinned(self, key: Key) -> Iterator[None]:
        self.pin(key)
        try:
            yield
        finally:
            self.unpin(key)

    def forget(self, key: Key) -> None:
        """Remove the template from all tiers, pinned or not. Jobs that use it keep the tensors they have."""
        with self._lock:
            self._forgetting.add(key)  # no move of it starts from here on
            self._lock.wait_for(lambda: not self._is_loading(key) and not self._spilling[key])
        self.ladder.drop(key)
        with self._lock:
            for loaded in [loaded for loaded in self._in_use if loaded[0] == key]:
                del self._in_use[loaded]
            self._forgetting.discard(key)

    def status(self) -> dict[TierName, TierStatus]:
        statuses = {}
        for tier in self.tiers:
            usage, num_hits = tier.usage(), self._hits[tier.name]
            statuses[tier.name] = TierStatus(
                usage.num_templates, usage.num_bytes, tier.max_bytes, num_hits, tier.num_evictions
            )
        return statuses

    def settle(self) -> None:
        """Wait until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the moves under way and end the threads."""
        self._loaders.shutdown()
        self._writer.shutdown()


def done(found: Found | None) -> Handle:
    handle: Handle = Future()
    handle.set_result(found)
    return handle


def memory_name(device: torch.device) -> TierName:
    return "gpu" if device.type == "cuda" else "host"

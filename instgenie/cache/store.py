"""The store: one place to ask for a template's activations, over the tiers that are there. Knows which tier is above
which and moves spans between them; knows no model.

    gpu        next to the model
    host       in main memory
    disk       survives the process
    remote     survives the machine

A template may lie in several tiers, or some of its spans in one and some in another. What is asked for is brought up
into memory, in a thread of the store's own, once for all who ask meanwhile. What a tier evicts goes to the next below
that takes it, unless it is below already. New spans are put into memory and, behind that, onto the disk: a process that
dies loses what it had not yet written, and no more.

Nothing that goes wrong below reaches who asks: it is reported, and a miss.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from rich.filesize import decimal

from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.memory import MemoryTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.tier import LastingTier, Tier, estimate
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span, join
from instgenie.machine.device import available_bytes, memory_guard
from instgenie.types import Pixels, TierName

CPU = torch.device("cpu")
NUM_LOADERS = 4  # templates that are brought up at once

logger = logging.getLogger(__name__)


class Lookup(Enum):
    MISS = "miss"  # it is not whole anywhere
    PENDING = "pending"  # it is below memory, or on its way up
    HIT = "hit"  # it is in memory


@dataclass(frozen=True, eq=False)
class Found:
    """All steps of a template, and the lowest tier they were in when they were asked for."""

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
    """All methods may be called by several threads at once. A tier belongs to one store. `on_evict` is told which
    template leaves which tier."""

    def __init__(
        self,
        gpu: GpuTier | None = None,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
        on_evict: Callable[[TierName, Key], None] | None = None,
    ) -> None:
        self.gpu, self.host, self.disk, self.remote = gpu, host, disk, remote
        self.memory: list[MemoryTier] = [tier for tier in (gpu, host) if tier]
        self.lasting: list[LastingTier] = [tier for tier in (disk, remote) if tier]
        self.tiers: list[Tier] = [*self.memory, *self.lasting]  # from the top
        self.on_evict = on_evict
        for index, tier in enumerate(self.tiers):
            tier.spill = partial(self._before_eviction, index)
        self._hits: Counter[TierName] = Counter()
        self._pins: dict[Key, tuple[int, contextlib.ExitStack]] = {}
        self._loading: dict[tuple[Key, torch.device], Handle] = {}
        self._in_use: WeakValueDictionary[tuple[Key, torch.device], Span] = WeakValueDictionary()
        self._spilling: Counter[Key] = Counter()
        self._forgetting: set[Key] = set()
        self._lock = threading.Condition()  # over all of these; held for moments
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, "store-load")
        self._writer = ThreadPoolExecutor(1, "store-write")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in memory, and nothing below it to look into."""
        return self.tiers == self.memory and not any(tier.usage().num_templates for tier in self.memory)

    def find(self, key: Key) -> Lookup:
        """Asks the remote tier only if no other has the template, and waits for its answer."""
        if self._in_memory(key):
            return Lookup.HIT
        with self._lock:
            if self._is_loading(key):
                return Lookup.PENDING
        return Lookup.PENDING if self._source(key) else Lookup.MISS

    def missing(self, key: Key) -> list[range]:
        """The spans that are in no tier."""
        return self._missing(key, key.spans, self.tiers)

    def prefetch(self, key: Key, device: torch.device = CPU) -> Handle:
        """Starts to bring a template up, if nobody has; waits for nothing. It comes to lie on the device if the gpu
        tier has room for it, else in main memory; without tiers in memory it lies on the device as long as somebody
        holds what was found."""
        with self._lock:
            handle = self._loading.get((key, device)) or self._at_hand(key, device)
            if not handle:
                handle = self._loading[key, device] = self._loaders.submit(self._bring, key, device)
        handle.add_done_callback(partial(self._loaded, key, device))
        return handle

    def get(self, key: Key, device: torch.device = CPU) -> Found | None:
        """Waits for what `prefetch` starts."""
        return self.prefetch(key, device).result()

    def put(self, key: Key, span: Span) -> None:
        """Keeps a span of a registration. Raises a CacheError if no tier has room for the template."""
        tiers = self.tiers[1:] if self.gpu and self.host else self.tiers  # the gpu tier gets what is asked for
        taken = self._sink(key, span, tiers)
        if self.disk and taken in self.memory:
            otherwise = f"stays in the {taken.name} tier alone"
            self._writer.submit(self._spill, key, self.tiers.index(taken), otherwise)

    def put_picture(self, key: Key, picture: Pixels) -> None:
        """Keeps the template's picture where it outlives the process, if there is room. It is gone when the template
        is."""
        with self._unless_forgotten(key) as may_move:
            if may_move:
                self._sink_picture(key, picture, self.lasting)

    def picture(self, key: Key) -> Pixels | None:
        return next((found for tier in self.lasting if (found := tier.load_picture(key)) is not None), None)

    def pictures(self) -> dict[Key, tuple[int, int]]:
        """The (height, width) of every picture that was put, by this process or another."""
        return {key: size for tier in reversed(self.lasting) for key, size in tier.pictures().items()}

    def pin(self, key: Key) -> None:
        """Until it is unpinned as often, the template stays where it is, and where it comes to be."""
        with self._lock:
            num, stack = self._pins.get(key) or (0, self._pin_all(key))
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
        """Removes the template from all tiers, pinned or not. Jobs that use it hold on to what they have."""
        with self._lock:
            self._forgetting.add(key)  # from here on nothing of it starts to move
            self._lock.wait_for(lambda: not self._is_loading(key) and not self._spilling[key])
        for tier in self.tiers:
            try:
                tier.drop(key)
            except CacheError as error:
                logger.warning("a template is not forgotten: %s", error)
        with self._lock:
            for loaded in [loaded for loaded in self._in_use if loaded[0] == key]:
                del self._in_use[loaded]
            self._forgetting.discard(key)

    def num_bytes(self, key: Key) -> int:
        """Of the lowest tier that is needed to have all of it; 0 if it is not whole."""
        source = self._source(key)
        return source.num_bytes(key) if source else 0

    def status(self) -> dict[TierName, TierStatus]:
        return {tier.name: self._tier_status(tier) for tier in self.tiers}

    def settle(self) -> None:
        """Waits until all that was put is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Finishes what is under way."""
        self._loaders.shutdown()
        self._writer.shutdown()

    # upwards

    def _in_memory(self, key: Key) -> bool:
        return any(not tier.missing(key, [key.steps]) for tier in self.memory)

    def _is_loading(self, key: Key) -> bool:
        return any(key == loading for loading, _ in self._loading)

    def _at_hand(self, key: Key, device: torch.device) -> Handle | None:
        """A handle that is done, if the template is where it shall be, or shall be nowhere."""
        if key in self._forgetting:
            return done(None)
        tier = next(iter(self._ladder(device)), None)
        span = tier.load(key, key.steps) if tier else self._in_use.get((key, device))
        return done(Found(span, tier.name if tier else memory_name(device))) if span else None

    def _ladder(self, device: torch.device) -> list[MemoryTier]:
        """Tiers in memory that serve a device, from the top."""
        return [tier for tier in self.memory if tier is not self.gpu or self.gpu.device == indexed(device)]

    def _loaded(self, key: Key, device: torch.device, handle: Handle) -> None:
        with self._lock:
            if self._loading.get((key, device)) is handle:
                del self._loading[key, device]
                self._lock.notify_all()
            if not handle.exception() and (found := handle.result()):
                self._hits[found.tier] += 1

    def _bring(self, key: Key, device: torch.device) -> Found | None:
        """Nothing that goes wrong on the way is an error to who asks."""
        try:
            with self.pinned(key), memory_guard("the template"):
                source = self._source(key)
                span = self._lift(key, device) if source else None
        except (CacheError, OutOfMemoryError) as error:
            logger.warning("the template's activations are not used: %s", error)
            return None
        return Found(span, source.name) if source and span else None

    def _lift(self, key: Key, device: torch.device) -> Span | None:
        """As far up as there is room."""
        ladder, refusal = self._ladder(device), None
        for tier in reversed(ladder):
            try:
                self._fill(tier, key)
            except (CacheError, OutOfMemoryError) as error:
                refusal = error
        for tier in ladder:
            if span := tier.load(key, key.steps):
                return span
        if refusal:
            raise refusal
        return None if ladder else self._join(key, device)

    def _fill(self, tier: MemoryTier, key: Key) -> None:
        """A tier with what the others have."""
        for steps in tier.missing(key, key.spans):
            if span := self._load(key, steps):
                with memory_guard("the template"):
                    tier.store(key, span)

    def _join(self, key: Key, device: torch.device) -> Span | None:
        loaded = [span for steps in key.spans if (span := self._load(key, steps))]
        if len(loaded) < len(key.spans):
            return None
        check_room(sum(span.num_bytes for span in loaded), device)
        span = self._in_use[key, device] = join(key.num_steps, loaded, device)
        return span

    def _load(self, key: Key, steps: range) -> Span | None:
        """From the highest tier that has it, whole."""
        return next((span for tier in self.tiers if (span := tier.load(key, steps))), None)

    def _source(self, key: Key) -> Tier | None:
        """The lowest tier that is needed to have all of the template."""
        missing = key.spans
        for tier in self.tiers:
            missing = tier.missing(key, missing)
            if not missing:
                return tier
        return None

    # downwards

    def _missing(self, key: Key, spans: Sequence[range], tiers: Sequence[Tier]) -> list[range]:
        missing = list(spans)
        for tier in tiers:
            missing = tier.missing(key, missing)
        return missing

    def _sink(self, key: Key, span: Span, tiers: Sequence[Tier]) -> Tier:
        """The first of the tiers that takes the span."""
        refusals = []
        for tier in tiers:
            try:
                with memory_guard("the template"):
                    tier.reserve(key, estimate(key, span))
                    tier.store(key, span)
                return tier
            except (CacheError, OutOfMemoryError) as error:
                refusals.append(str(error))
        raise CacheError("; ".join(refusals) or "the store has no tiers")

    def _spill(self, key: Key, index: int, otherwise: str) -> None:
        """What a tier has of a template, and none below it has, goes down."""
        try:
            with self._unless_forgotten(key) as may_move:
                if may_move:
                    self._send_down(key, self.tiers[index], self.tiers[index + 1 :])
        except CacheError as error:
            logger.warning("a template %s: %s", otherwise, error)

    def _send_down(self, key: Key, tier: Tier, below: Sequence[Tier]) -> None:
        if not below:
            return
        absent = tier.missing(key, key.spans)
        for steps in self._missing(key, [steps for steps in key.spans if steps not in absent], below):
            if span := tier.load(key, steps):
                self._sink(key, span, below)

        if tier in self.lasting and (picture := self.lasting[0].load_picture(key)) is not None:
            self._sink_picture(key, picture, self.lasting[1:])

    def _sink_picture(self, key: Key, picture: Pixels, tiers: Sequence[LastingTier]) -> None:
        for tier in tiers:
            try:
                tier.store_picture(key, picture)
                return
            except CacheError as error:
                logger.warning("the picture of a template is not kept: %s", error)

    @contextlib.contextmanager
    def _unless_forgotten(self, key: Key) -> Iterator[bool]:
        """Whether the template may move; who forgets it waits until the block ends."""
        with self._lock:
            may_move = key not in self._forgetting
            self._spilling[key] += may_move
        try:
            yield may_move
        finally:
            with self._lock:
                self._spilling[key] -= may_move
                self._spilling += Counter()  # keeps those that are above 0
                self._lock.notify_all()

    def _before_eviction(self, index: int, key: Key) -> None:
        name = self.tiers[index].name
        self._spill(key, index, f"leaves the {name} tier and is lost")
        if self.on_evict:
            self.on_evict(name, key)

    # the rest

    def _pin_all(self, key: Key) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for tier in self.tiers:
            try:
                stack.enter_context(tier.pin(key))
            except CacheError as error:
                logger.warning("a template is not pinned: %s", error)
        return stack

    def _tier_status(self, tier: Tier) -> TierStatus:
        usage = tier.usage()
        return TierStatus(
            num_templates=usage.num_templates,
            num_bytes=usage.num_bytes,
            max_bytes=tier.max_bytes,
            num_hits=self._hits[tier.name],
            num_evictions=tier.num_evictions,
        )


def done(found: Found | None) -> Handle:
    handle: Handle = Future()
    handle.set_result(found)
    return handle


def check_room(num_bytes: int, device: torch.device) -> None:
    available = available_bytes(device)
    if num_bytes > available:
        raise OutOfMemoryError(f"they need {decimal(num_bytes)}: {device} has {decimal(int(available))} available")


def memory_name(device: torch.device) -> TierName:
    return "gpu" if device.type == "cuda" else "host"


def indexed(device: torch.device) -> torch.device:
    """cuda -> cuda:0"""
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device

"""The ladder of tiers: which tier is above which, and how spans move up and down between them. Knows no thread and no
lock: the store decides when a template moves.

    gpu        next to the model
    host       in main memory
    disk       survives the process
    peer       in the memory of other workers; spans come from there, and none go there
    remote     survives the machine

A template may lie in several tiers, or some of its spans in one and some in another.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from instgenie.cache.disk import DiskTier
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.memory import MemoryTier
from instgenie.cache.peers import PeerTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.tier import LastingTier, SpanSource, Tier, estimate
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span, join
from instgenie.machine.device_memory import available_bytes, memory_guard
from instgenie.types import TierName

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Lifted:
    """A template that was brought up, and the lowest place that any of its spans came from; None: it was there."""

    span: Span
    lowest: TierName | None


class Ladder:
    def __init__(
        self,
        gpu: GpuTier | None,
        host: HostTier | None,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        peers: PeerTier | None = None,
    ) -> None:
        self.gpu = gpu
        self.memory: list[MemoryTier] = [tier for tier in (gpu, host) if tier]
        self.lasting: list[LastingTier] = [tier for tier in (disk, remote) if tier]
        self.tiers: list[Tier] = [*self.memory, *self.lasting]  # from the top
        below: list[SpanSource] = [source for source in (disk, peers, remote) if source]
        self.sources: list[SpanSource] = [*self.memory, *below]  # from the top

    def missing(self, key: Key, spans: Sequence[range], tiers: Sequence[SpanSource]) -> list[range]:
        """The spans that are in none of the tiers."""
        missing = list(spans)
        for tier in tiers:
            missing = tier.missing(key, missing)
        return missing

    def source(self, key: Key, tiers: Sequence[SpanSource]) -> TierName | None:
        """The lowest of the tiers that is needed to have all of the template; None if the template is not whole."""
        missing = key.spans
        for tier in tiers:
            missing = tier.missing(key, missing)
            if not missing:
                return tier.name
        return None

    def is_in_memory(self, key: Key) -> bool:
        return any(not tier.missing(key, [key.slots]) for tier in self.memory)

    def memory_for(self, device: torch.device) -> list[MemoryTier]:
        """The tiers in memory that serve a device, from the top."""
        return [tier for tier in self.memory if tier is not self.gpu or self.gpu.device == with_index(device)]

    def lift(self, key: Key, device: torch.device) -> Lifted | None:
        """Bring a template as far up as there is room, and return all of it. Without a tier in memory for the device,
        the returned tensors on the device are the only copy."""
        tiers, refusal, used = self.memory_for(device), None, set[TierName]()
        for tier in reversed(tiers):
            try:
                self._fill(tier, key, used)
            except (CacheError, OutOfMemoryError) as error:
                refusal = error
        for tier in tiers:
            if span := tier.load(key, key.slots):
                return Lifted(span, self._lowest(used))
        if refusal:
            raise refusal
        joined = None if tiers else self._join(key, device, used)
        return Lifted(joined, self._lowest(used)) if joined else None

    def _lowest(self, used: set[TierName]) -> TierName | None:
        return next((source.name for source in reversed(self.sources) if source.name in used), None)

    def _fill(self, tier: MemoryTier, key: Key, used: set[TierName]) -> None:
        """Copy into a tier all spans that it lacks and another tier has. The names of those are added to `used`."""
        for steps in tier.missing(key, key.spans):
            if span := self._load(key, steps, used):
                with memory_guard("the template"):
                    tier.store(key, span)

    def _join(self, key: Key, device: torch.device, used: set[TierName]) -> Span | None:
        loaded = [span for steps in key.spans if (span := self._load(key, steps, used))]
        if len(loaded) < len(key.spans):
            return None
        check_room(sum(span.num_bytes for span in loaded), device)
        return join(key.num_kept, loaded, device)

    def _load(self, key: Key, steps: range, used: set[TierName]) -> Span | None:
        """The span from the highest place that has it undamaged."""
        for source in self.sources:
            if span := source.load(key, steps):
                used.add(source.name)
                return span
        return None

    def sink(self, key: Key, span: Span, tiers: Sequence[Tier], refusals: Sequence[str] = ()) -> None:
        """Store a span in the first of the tiers that takes it. `refusals` are those of other tiers, for the error."""
        reasons = list(refusals)
        for tier in tiers:
            try:
                with memory_guard("the template"):
                    tier.reserve(key, estimate(key, span))
                    tier.store(key, span)
                return
            except (CacheError, OutOfMemoryError) as error:
                reasons.append(str(error))
        raise CacheError("; ".join(reasons) or "the store has no tiers")

    def send_down(self, key: Key, index: int, below: Sequence[Tier]) -> None:
        """Copy from tier `index` the spans of a template that the tiers below lack, each to the first that takes it."""
        tier = self.tiers[index]
        absent = tier.missing(key, key.spans)
        for steps in self.missing(key, [steps for steps in key.spans if steps not in absent], below):
            if span := tier.load(key, steps):
                self.sink(key, span, below)

    def send_picture_down(self, key: Key, index: int) -> None:
        """Copy the picture of a template from a lasting tier to the one below it."""
        position = index - len(self.memory)
        picture = self.lasting[position].load_picture(key)
        if picture is not None:
            for tier in self.lasting[position + 1 : position + 2]:
                tier.store_picture(key, picture)

    def pin(self, key: Key, tiers: Sequence[Tier] | None = None) -> contextlib.ExitStack:
        """Pin a template in all tiers, or in those given, until the returned stack is closed."""
        stack = contextlib.ExitStack()
        for tier in self.tiers if tiers is None else tiers:
            try:
                stack.enter_context(tier.pin(key))
            except CacheError as error:
                logger.warning("a template is not pinned: %s", error)
        return stack

    def memory_of(self, key: Key) -> MemoryTier | None:
        """The highest tier in memory that has any of the template."""
        return next((tier for tier in self.memory if tier.num_bytes(key)), None)

    def drop(self, key: Key) -> list[TierName]:
        """Remove a template from all tiers. Return those that may still have it."""
        left: list[TierName] = []
        for tier in self.tiers:
            try:
                is_gone = tier.drop(key)
            except CacheError as error:
                logger.warning("a template is not forgotten: %s", error)
                is_gone = False
            if not is_gone:
                left.append(tier.name)
        return left


def check_room(num_bytes: int, device: torch.device) -> None:
    available = available_bytes(device)
    if num_bytes > available:
        raise OutOfMemoryError(f"they need {decimal(num_bytes)}: {device} has {decimal(int(available))} available")


def with_index(device: torch.device) -> torch.device:
    """cuda -> cuda:0"""
    return torch.device(device.type, device.index or 0) if device.type == "cuda" else device

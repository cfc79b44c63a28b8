"""The store: one place to ask for a template's activations, over a ladder of tiers. Decides when templates move and
makes sure that a move happens once; `ladder` knows how they move.

A template that is asked for is brought up into memory by a thread of the store, once for all callers that ask
meanwhile. New spans are put into memory first; the writer copies them to every tier that outlives the process, so a
process that dies loses only what it had not written yet. A template that the gpu tier evicts goes to the host tier, and
one that the disk evicts to the remote tier, unless it is there already.

A failure in a tier never reaches the caller: it is logged and counts as a miss.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch

from instgenie.cache.disk import DiskTier
from instgenie.cache.expiry import Expiry
from instgenie.cache.gpu import GpuTier
from instgenie.cache.host import HostTier
from instgenie.cache.ladder import Ladder
from instgenie.cache.loads import Found, Handle, Loads
from instgenie.cache.moves import Moves
from instgenie.cache.peers import PeerTier
from instgenie.cache.remote import RemoteTier
from instgenie.cache.tier import Tier, estimate
from instgenie.cache.tombstones import Tombstones
from instgenie.cache.writer import Writer
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.device_memory import memory_guard
from instgenie.types import Pixels, TierName

__all__ = ["Found", "Handle", "Lookup", "Store", "TierStatus"]

CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


class Lookup(Enum):
    MISS = "miss"  # no tier has it, or only some of its spans are anywhere
    PENDING = "pending"  # it is below memory, or on its way up
    HIT = "hit"  # it is in memory


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
        peers: PeerTier | None = None,
    ) -> None:
        self.gpu, self.host, self.disk, self.remote, self.peers = gpu, host, disk, remote, peers
        self.ladder = Ladder(gpu, host, disk, remote, peers)
        self.memory, self.lasting, self.tiers = self.ladder.memory, self.ladder.lasting, self.ladder.tiers
        self.on_evict = on_evict
        for index, tier in enumerate(self.tiers):
            tier.spill = partial(self._before_eviction, index)
        self._pins: dict[Key, tuple[int, contextlib.ExitStack]] = {}
        self.moves = Moves()
        self.writer = Writer(self.ladder, self.moves)
        self.tombstones = Tombstones(disk.folder if disk else None)
        self.expiry = Expiry(self.ladder)
        self._lock = self.moves.changed  # guards the pins; never held while data moves
        self.loads = Loads(self.ladder, self.moves, self.writer, self.pinned, self.tombstones)

    @property
    def is_empty(self) -> bool:
        """True if memory holds no template and there is no tier below it."""
        return self.tiers == self.memory and not any(tier.usage().num_templates for tier in self.memory)

    def find(self, key: Key) -> Lookup:
        """Ask where a template is. Only if no other tier has it, this waits for answers of peers and of the remote
        tier."""
        if self.ladder.is_in_memory(key):
            return Lookup.HIT
        if self.loads.is_loading(key):
            return Lookup.PENDING
        return Lookup.PENDING if self.loads.source(key) else Lookup.MISS

    def missing(self, key: Key) -> list[range]:
        """The spans that are in no tier of this store; what its peers have does not count."""
        return self.ladder.missing(key, key.spans, self.tiers_of(key))

    def num_bytes(self, key: Key) -> int:
        """Bytes in the lowest tier that is needed to have all of the template; 0 if the template is not whole."""
        source = self.ladder.source(key, self.tiers_of(key))
        return next((tier.num_bytes(key) for tier in self.tiers if tier.name == source), 0)

    def tiers_of(self, key: Key) -> list[Tier]:
        """The tiers in which a template counts: what the lasting ones still have of a forgotten one does not."""
        return list(self.memory) if key in self.tombstones else self.tiers

    # upwards

    def prefetch(self, key: Key, device: torch.device = CPU) -> Handle:
        """Start to bring a template up unless that is under way, without waiting. It comes to lie on the device if the
        gpu tier has room, else in main memory. Without tiers in memory it stays on the device as long as a caller holds
        the span."""
        self.expiry.use(key)
        return self.loads.start(key, device)

    def get(self, key: Key, device: torch.device = CPU) -> Found | None:
        """Prefetch, and wait for the result."""
        return self.prefetch(key, device).result()

    # downwards

    def put(self, key: Key, span: Span) -> None:
        """Keep a span of a registration. Waits for room that templates take which are about to be written. Raises a
        CacheError if no tier has room for the template."""
        while True:
            num_releases = self.writer.num_releases
            refusals = self._remember(key, span)
            if not refusals or not self.writer.wait_for_room(key, num_releases):
                break
        if refusals or not self.memory:
            self.ladder.sink(key, span, self.lasting, refusals)
        self._write(key)

    def offer(self, key: Key, span: Span) -> bool:
        """Keep a span of a registration as `put` does, but without waiting for any tier below memory. Return False if
        there will be room later."""
        num_releases = self.writer.num_releases
        refusals = self._remember(key, span)
        if not refusals and self.memory:
            self._write(key)
            return True
        if self.memory and (self.writer.is_holding(key) or self.writer.num_releases > num_releases):
            return False
        if not self.lasting:
            raise CacheError("; ".join(refusals) or "the store has no tiers")
        if not self.writer.takes(span.num_bytes):
            return False
        self._write(key, span)
        return True

    def has_room(self, key: Key, num_bytes: int) -> bool:
        """Return whether `offer` would answer at once for a template of `num_bytes`, with yes or with an error."""
        if self.memory:
            return self.memory[-1].fits(key, num_bytes) or not self.writer.is_holding(key)
        return self.writer.takes(num_bytes)

    def _remember(self, key: Key, span: Span) -> list[str]:
        """Keep a span in memory, and return why it cannot be kept there. The gpu tier is for what is asked for, where
        there is a host tier."""
        try:
            for tier in self.memory[-1:]:
                with memory_guard("the template"):
                    tier.reserve(key, estimate(key, span))
                    tier.store(key, span)
        except (CacheError, OutOfMemoryError) as error:
            return [str(error)]
        return []

    def _write(self, key: Key, span: Span | None = None) -> None:
        """Write a new span to all lasting tiers, beside other work. A template that was forgotten before is no more."""
        self.tombstones.remove(key)
        self.expiry.use(key)
        self.writer.add(key, span)

    def _before_eviction(self, index: int, key: Key) -> None:
        tier = self.tiers[index]
        below = self.memory[index + 1 :] if index < len(self.memory) else self.lasting[index - len(self.memory) + 1 :]
        is_lost = index < len(self.memory) and self.ladder.memory_of(key) is tier and self.writer.lose(key)
        try:
            with self.moves.moving(key) as may_move:
                if may_move and below:
                    self.ladder.send_down(key, index, below)
                    if tier in self.lasting:
                        self.ladder.send_picture_down(key, index)
        except CacheError as error:
            if is_lost or not self.lasting or tier in self.lasting:
                logger.warning("a template leaves the %s tier and is lost: %s", tier.name, error)
        else:
            if is_lost and not below:
                logger.warning("a template leaves the %s tier and is lost: no other tier took it", tier.name)
        if self.on_evict:
            self.on_evict(tier.name, key)

    # pictures

    def put_picture(self, key: Key, picture: Pixels, is_asked_for: bool = False) -> None:
        """Keep the template's picture in all lasting tiers that have room, beside other work. It is removed with the
        template. A template that a client asked for does not expire."""
        with self.moves.moving(key) as may_move:
            if may_move:
                self.writer.add(key, picture=picture, is_asked_for=is_asked_for)
                if is_asked_for:
                    self.expiry.ask_for(key)

    def picture(self, key: Key) -> Pixels | None:
        unwritten = self.writer.picture(key)
        if unwritten is not None or key in self.tombstones:
            return unwritten
        return next((found for tier in self.lasting if (found := tier.load_picture(key)) is not None), None)

    def pictures(self) -> dict[Key, tuple[int, int]]:
        """The (height, width) of every picture that was put, by this process or another."""
        found = {key: size for tier in reversed(self.lasting) for key, size in tier.pictures().items()}
        return {key: size for key, size in found.items() if key not in self.tombstones}

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

    def forget(self, key: Key) -> list[TierName]:
        """Remove the template from all tiers, pinned or not. Jobs that use it keep the tensors they have. Return the
        tiers that could not be asked: what they have is not used any more, and `forget` has to be called again."""
        with self.moves.forgetting(key, lambda: self.loads.is_loading(key)):
            self.writer.discard(key)
            left = self.ladder.drop(key)
            if left:
                self.tombstones.add(key)
            else:
                self.tombstones.remove(key)
            self.loads.forget(key)
            self.expiry.forget(key)
            if self.peers:
                self.peers.forget(key)
        return left

    def ask_for(self, key: Key) -> None:
        """Note that a client asked for a template: it does not expire."""
        self.expiry.ask_for(key)
        self.writer.add(key, is_asked_for=True)

    def status(self) -> dict[TierName, TierStatus]:
        statuses = {}
        for tier in self.tiers:
            usage, num_hits = tier.usage(), self.loads.hits[tier.name]
            statuses[tier.name] = TierStatus(
                usage.num_templates, usage.num_bytes, tier.max_bytes, num_hits, tier.num_evictions
            )
        return statuses

    def settle(self) -> None:
        """Wait until all that was put is written."""
        self.writer.settle()

    def close(self) -> None:
        """Finish the moves under way and end the threads."""
        self.writer.close()
        self.loads.close()
        if self.peers:
            self.peers.close()

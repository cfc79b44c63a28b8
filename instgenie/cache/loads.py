"""Loads: templates are brought up into memory by threads, once for all callers that ask meanwhile. Knows threads;
`ladder` knows how spans move."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch

from instgenie.cache.ladder import Ladder
from instgenie.cache.moves import Moves
from instgenie.cache.tombstones import Tombstones
from instgenie.cache.writer import Writer
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.device_memory import memory_guard
from instgenie.types import TierName

NUM_LOADERS = 4  # templates that are brought up at once

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Found:
    """All steps of a template, and the lowest tier that was needed when it was asked for."""

    span: Span
    tier: TierName


Handle: TypeAlias = Future[Found | None]  # None is a miss


class Loads:
    """`pinned` keeps a template from being evicted. `on_loaded` is called with the lowest place that was needed to
    bring a template up, its bytes and the seconds that took."""

    def __init__(
        self,
        ladder: Ladder,
        moves: Moves,
        writer: Writer,
        pinned: Callable[[Key], AbstractContextManager[None]],
        tombstones: Tombstones,
    ) -> None:
        self.ladder, self.moves, self.writer, self.pinned, self.tombstones = ladder, moves, writer, pinned, tombstones
        self.on_loaded: Callable[[TierName, int, float], None] = lambda *_: None
        self.hits: Counter[TierName] = Counter()
        self._loading: dict[tuple[Key, torch.device], Handle] = {}
        self._in_use: WeakValueDictionary[tuple[Key, torch.device], Span] = WeakValueDictionary()
        self._changed = moves.changed  # guards the three above
        self._threads = ThreadPoolExecutor(NUM_LOADERS, "store-load")

    def start(self, key: Key, device: torch.device) -> Handle:
        """Start to bring a template up unless that is under way."""
        with self._changed:
            handle = self._loading.get((key, device)) or self._at_hand(key, device)
            if not handle:
                handle = self._loading[key, device] = self._threads.submit(self._bring, key, device)
        handle.add_done_callback(partial(self._loaded, key, device))
        return handle

    def source(self, key: Key) -> TierName | None:
        """The lowest place that is needed to have all of a template; None if it is not whole. What places below memory
        still have of a forgotten template does not count."""
        return self.ladder.source(key, self.ladder.memory if key in self.tombstones else self.ladder.sources)

    def is_loading(self, key: Key) -> bool:
        with self._changed:
            return any(key == loading for loading, _ in self._loading)

    def forget(self, key: Key) -> None:
        """Let nobody share any more what was brought up of a template without a tier in memory."""
        with self._changed:
            for loaded in [loaded for loaded in self._in_use if loaded[0] == key]:
                del self._in_use[loaded]

    def close(self) -> None:
        self._threads.shutdown()

    def _at_hand(self, key: Key, device: torch.device) -> Handle | None:
        """A finished handle if nothing has to move: the template is as far up as it gets, or is being forgotten."""
        if not self.moves.may_move(key):
            return done(None)
        tier = next(iter(self.ladder.memory_for(device)), None)
        span = tier.load(key, key.slots) if tier else self._in_use.get((key, device))
        return done(Found(span, tier.name if tier else memory_name(device))) if span else None

    def _bring(self, key: Key, device: torch.device) -> Found | None:
        """Bring a template up, in a thread of its own; a failure is a miss. If memory is full of templates that are
        about to be written, this waits for them."""
        while True:
            num_releases, start = self.writer.num_releases, time.monotonic()
            try:
                with self.pinned(key), memory_guard("the template"):
                    source = self.source(key)
                    lifted = self.ladder.lift(key, device) if source else None
                break
            except (CacheError, OutOfMemoryError) as error:
                if not self.writer.wait_for_room(key, num_releases):
                    logger.warning("the template's activations are not used: %s", error)
                    return None
        if not source or not lifted:
            return None
        if not self.ladder.memory_for(device):
            self._in_use[key, device] = lifted.span
        if lifted.lowest == "peer":
            self.writer.add(key)  # the peer may die before it has written the template to a lasting tier
        if lifted.lowest:
            self.on_loaded(lifted.lowest, lifted.span.num_bytes, time.monotonic() - start)
        return Found(lifted.span, lifted.lowest or source)

    def _loaded(self, key: Key, device: torch.device, handle: Handle) -> None:
        with self._changed:
            if self._loading.get((key, device)) is handle:
                del self._loading[key, device]
                self._changed.notify_all()
            if not handle.exception() and (found := handle.result()):
                self.hits[found.tier] += 1


def done(found: Found | None) -> Handle:
    handle: Handle = Future()
    handle.set_result(found)
    return handle


def memory_name(device: torch.device) -> TierName:
    return "gpu" if device.type == "cuda" else "host"

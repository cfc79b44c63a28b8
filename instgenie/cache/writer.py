"""The writer of a store: copies templates to the tiers that outlive the process, beside all other work. Decides what is
written when; tiers know how.

Each lasting tier has one thread, and a template goes to one tier after the other, from the top. Until the first of them
has it, the template is pinned in memory, so unwritten templates never take more memory than the tier may hold. A
template that a tier does not take, because it is full or its server is gone, is tried again from time to time for as
long as memory or another tier has it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from instgenie.cache.ladder import Ladder
from instgenie.cache.moves import Moves
from instgenie.cache.tier import LastingTier, estimate
from instgenie.errors import CacheError, OutOfMemoryError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.device_memory import memory_guard
from instgenie.types import Pixels

MAX_QUEUED_BYTES = 2**30  # of spans that wait to be written and are in no tier; one span may always wait
FIRST_PAUSE, LAST_PAUSE = 2.0, 300.0  # seconds before a tier is given again what it did not take

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Unwritten:
    """A template of which something is to be written."""

    hold: contextlib.ExitStack  # pins it in memory
    is_held: bool = True
    num_additions: int = 0
    is_safe: bool = False  # a lasting tier has all that was added
    is_failed: bool = False  # no lasting tier took it
    with_picture: bool = False
    is_asked_for: bool = False
    picture: Pixels | None = None  # None: a lasting tier has it
    spans: dict[range, Span] = field(default_factory=dict)  # those that no tier in memory has

    @property
    def num_queued_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans.values())


class Writer:
    """All methods are thread-safe. `on_written` is called with a template when a tier has taken or refused it."""

    def __init__(self, ladder: Ladder, moves: Moves) -> None:
        self.ladder, self.moves = ladder, moves
        self.on_written: Callable[[Key], None] = lambda _: None
        self.num_releases = 0  # of templates in memory that may be evicted since they are written or given up
        self._unwritten: dict[Key, Unwritten] = {}
        self._queued: set[tuple[int, Key]] = set()  # by the index of the tier
        self._failed: dict[Key, bool] = {}  # to be tried again, the oldest first; True: a client asked for it
        self._pause = FIRST_PAUSE
        self._timer: threading.Timer | None = None
        self._changed = moves.changed  # guards all of the above
        self._threads = [ThreadPoolExecutor(1, f"store-{tier.name}") for tier in ladder.lasting]

    def add(
        self,
        key: Key,
        span: Span | None = None,
        picture: Pixels | None = None,
        is_asked_for: bool = False,
        with_picture: bool = False,
    ) -> None:
        """Write all of a template that is in memory, and the span and the picture if they are given. `with_picture`: a
        picture that one lasting tier has is copied to those below it."""
        if not self._threads:
            return
        with self._changed:
            unwritten = self._unwritten.get(key)
            if not unwritten or not unwritten.is_held:
                hold = self.ladder.pin(key, self.ladder.memory)
                unwritten = self._unwritten.setdefault(key, Unwritten(hold))
                unwritten.hold, unwritten.is_held = hold, True
            unwritten.num_additions += 1
            unwritten.is_safe = unwritten.is_failed = False
            unwritten.is_asked_for |= is_asked_for
            if span:
                unwritten.spans[span.steps] = span
            unwritten.with_picture |= with_picture or picture is not None
            if picture is not None:
                unwritten.picture = picture
        self._submit(0, key)

    def takes(self, num_bytes: int) -> bool:
        """Return whether a span that no tier in memory has may wait to be written."""
        with self._changed:
            queued = sum(unwritten.num_queued_bytes for unwritten in self._unwritten.values())
        return not queued or queued + num_bytes <= MAX_QUEUED_BYTES

    def is_holding(self, key: Key) -> bool:
        """Return whether templates other than this one are in memory only because they are not yet written."""
        with self._changed:
            return any(unwritten.is_held for other, unwritten in self._unwritten.items() if other != key)

    def is_pending(self, key: Key) -> bool:
        """Return whether the first lasting tier to take a template is still to be found."""
        with self._changed:
            unwritten = self._unwritten.get(key)
            return unwritten is not None and not unwritten.is_safe and not unwritten.is_failed

    def picture(self, key: Key) -> Pixels | None:
        """The picture of a template, as long as no lasting tier has it."""
        with self._changed:
            return unwritten.picture if (unwritten := self._unwritten.get(key)) else None

    def wait_for_room(self, key: Key, num_releases: int) -> bool:
        """Wait until templates are written that stay in memory only for that. Return whether any was, since the given
        number of releases."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.num_releases > num_releases or not self.is_holding(key) or not self.moves.may_move(key)
            )
            return self.num_releases > num_releases and self.moves.may_move(key)

    def discard(self, key: Key) -> None:
        """Write no more of a template."""
        with self._changed:
            self._failed.pop(key, None)
            if unwritten := self._unwritten.pop(key, None):
                self._release(unwritten)

    def lose(self, key: Key) -> bool:
        """Note that a template has left memory. Return whether it is lost because no lasting tier took it."""
        with self._changed:
            unwritten = self._unwritten.get(key)
            is_lost = unwritten is not None and not unwritten.is_safe
            if is_lost:
                self.discard(key)
            return is_lost

    def settle(self) -> None:
        """Wait until every tier was given all that was added."""
        for thread in self._threads:
            thread.submit(lambda: None).result()

    def close(self) -> None:
        """Try once more what failed, then finish all writing and end the threads."""
        with self._changed:
            failed, self._failed = self._failed, {}
            if self._timer:
                self._timer.cancel()
        for key, is_asked_for in failed.items():
            self.add(key, is_asked_for=is_asked_for, with_picture=True)
        for thread in self._threads:  # each hands on to the next
            thread.shutdown()

    # in threads

    def _submit(self, index: int, key: Key) -> None:
        with self._changed:
            if (index, key) not in self._queued:
                self._queued.add((index, key))
                self._threads[index].submit(self._write, index, key)

    def _write(self, index: int, key: Key) -> None:
        tier = self.ladder.lasting[index]
        with self._changed:
            self._queued.discard((index, key))
            unwritten = self._unwritten.get(key)
            num_additions = unwritten.num_additions if unwritten else 0
        if not unwritten:
            return
        error = self._try_copy(tier, key, unwritten)
        with self._changed:
            if self._unwritten.get(key) is unwritten:
                self._conclude(index, key, unwritten, error, unwritten.num_additions == num_additions)
            self._changed.notify_all()
        self.on_written(key)

    def _try_copy(self, tier: LastingTier, key: Key, unwritten: Unwritten) -> str:
        """Copy to a tier what it lacks of a template. Return why that failed; empty if it did not."""
        try:
            with memory_guard("the template"):
                self._copy(tier, key, unwritten)
        except (CacheError, OutOfMemoryError) as error:
            return str(error)
        except Exception as error:
            logger.exception("a template was not written to the %s tier", tier.name)
            return repr(error)
        return ""

    def _copy(self, tier: LastingTier, key: Key, unwritten: Unwritten) -> None:
        has_reserved = False
        for steps in tier.missing(key, key.spans):
            with self._moving(key, unwritten) as may_move:  # span by span, so that forgetting waits for one at most
                span = self._find(tier, key, steps, unwritten) if may_move else None
                if span:
                    if not has_reserved:
                        tier.reserve(key, estimate(key, span))
                        has_reserved = True
                    tier.store(key, span)
        with self._moving(key, unwritten) as may_move:
            picture = self._find_picture(tier, key, unwritten) if may_move else None
            if picture is not None:
                tier.store_picture(key, picture)
            if may_move and unwritten.is_asked_for:
                tier.mark_asked_for(key)

    @contextlib.contextmanager
    def _moving(self, key: Key, unwritten: Unwritten) -> Iterator[bool]:
        """Yield whether a template may be written: not while it is being forgotten, and not after."""
        with self.moves.moving(key) as may_move:
            yield may_move and self._unwritten.get(key) is unwritten

    def _find(self, tier: LastingTier, key: Key, steps: range, unwritten: Unwritten) -> Span | None:
        others = (*self.ladder.memory, *(other for other in self.ladder.lasting if other is not tier))
        return unwritten.spans.get(steps) or next((span for one in others if (span := one.load(key, steps))), None)

    def _find_picture(self, tier: LastingTier, key: Key, unwritten: Unwritten) -> Pixels | None:
        if not unwritten.with_picture or unwritten.picture is not None:
            return unwritten.picture
        above = self.ladder.lasting[: self.ladder.lasting.index(tier)]
        return next((found for one in above if (found := one.load_picture(key)) is not None), None)

    def _conclude(self, index: int, key: Key, unwritten: Unwritten, error: str, is_current: bool) -> None:
        """Record that a tier was given a template; `is_current`: nothing was added to the template meanwhile."""
        is_last = index + 1 == len(self._threads)
        if error:
            self._fail(index, key, unwritten, error)
        elif is_current:
            unwritten.is_safe, unwritten.picture = True, None
            unwritten.spans.clear()
            self._release(unwritten)
        if not is_last:
            self._submit(index + 1, key)
        elif is_current and not unwritten.is_safe:
            unwritten.is_failed = True
            unwritten.spans.clear()
            self._release(unwritten)
        elif is_current:
            del self._unwritten[key]
            if not error and key not in self._failed:
                self._go_on()

    def _fail(self, index: int, key: Key, unwritten: Unwritten, error: str) -> None:
        name, above = self.ladder.lasting[index].name, self.ladder.memory_of(key)
        if unwritten.is_safe or not above:
            logger.warning("a template is not written to the %s tier: %s", name, error)
        else:
            logger.warning("a template stays in the %s tier alone: %s", above.name, error)
        self._failed[key] = unwritten.is_asked_for
        if not self._timer:
            self._timer = threading.Timer(self._pause, self._retry)
            self._timer.daemon = True
            self._timer.start()
            self._pause = min(2 * self._pause, LAST_PAUSE)

    def _retry(self) -> None:
        """Try one template again. If that works, the others follow; if not, the next pause is longer."""
        with self._changed:
            self._timer = None
            self._next_failed()

    def _go_on(self) -> None:
        self._pause = FIRST_PAUSE
        if not self._timer:
            self._next_failed()

    def _next_failed(self) -> None:
        if key := next(iter(self._failed), None):
            with contextlib.suppress(RuntimeError):  # the writer is closed
                self.add(key, is_asked_for=self._failed.pop(key), with_picture=True)

    def _release(self, unwritten: Unwritten) -> None:
        if unwritten.is_held:
            unwritten.is_held = False
            unwritten.hold.close()
            self.num_releases += 1
            self._changed.notify_all()

"""What all tiers have in common. A tier keeps spans of templates within a number of bytes; it knows no model and no
other tier.

What was used least recently is evicted first, and whole; what is pinned is not evicted. Before a template goes, `spill`
is called with its key, so that somebody may take it further down.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from instgenie.jobs.activations import Key, Span
from instgenie.types import Pixels, TierName

Spill = Callable[[Key], None]


@dataclass(frozen=True)
class Usage:
    """What is in a tier."""

    num_templates: int
    num_bytes: int


@dataclass(frozen=True)
class Stored:
    """What one template takes up in a tier of files."""

    name: str  # of its folder
    num_bytes: int
    used: float  # when it last was


class Tier(Protocol):
    """All methods may be called by several threads at once."""

    @property
    def name(self) -> TierName: ...

    max_bytes: int
    num_evictions: int
    spill: Spill

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """Those of the spans that are not there."""

    def load(self, key: Key, steps: range) -> Span | None:
        """The span, if it is there and whole."""

    def reserve(self, key: Key, num_bytes: int) -> None:
        """Makes room for a whole template of so many bytes, or raises a CacheError."""

    def store(self, key: Key, span: Span) -> None:
        """Keeps a copy of the span, or raises a CacheError."""

    def pin(self, key: Key) -> AbstractContextManager[None]:
        """Until the block ends the template is not evicted."""

    def drop(self, key: Key) -> None:
        """Forgets the template, pinned or not. Who has loaded of it keeps what was loaded."""

    def num_bytes(self, key: Key) -> int: ...

    def usage(self) -> Usage: ...


class LastingTier(Tier, Protocol):
    """One that outlives the process, so that a template may be found by who has no picture of it."""

    def store_picture(self, key: Key, picture: Pixels) -> None:
        """Beside the template's spans, and gone with them; or raises a CacheError."""

    def load_picture(self, key: Key) -> Pixels | None:
        """The picture, if it is there and whole."""

    def pictures(self) -> Mapping[Key, tuple[int, int]]:
        """The (height, width) of all pictures there are."""


def keep_nothing(_: Key) -> None:
    """What becomes of evicted templates where nobody takes them."""


def total(stored: Iterable[Stored]) -> int:
    return sum(template.num_bytes for template in stored)


def estimate(key: Key, span: Span) -> int:
    """Bytes of the whole template."""
    return span.num_bytes * key.num_steps // len(span.steps)

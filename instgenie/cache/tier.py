"""What all tiers have in common. A tier keeps spans of templates within a number of bytes; it knows no model and no
other tier.

What was used least recently is evicted first, and whole; what is pinned is not evicted. Before a template goes, `spill`
is called with its key, so that somebody may take it further down.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from instgenie.activations import Key, Span
from instgenie.types import TierName

Spill = Callable[[Key], None]


@dataclass(frozen=True)
class Usage:
    """What is in a tier."""

    num_templates: int
    num_bytes: int


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


def keep_nothing(_: Key) -> None:
    """What becomes of evicted templates where nobody takes them."""


def estimate(key: Key, span: Span) -> int:
    """Bytes of the whole template."""
    return span.num_bytes * key.num_steps // len(span.steps)

"""The interface of a tier, which keeps spans of templates within a limit of bytes. A tier knows no model and no other
tier.

Whole templates are evicted, the least recently used first; pinned templates are not. Before a template is evicted,
`spill` is called with its key, so that the store can copy it to a lower tier.
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
    """The contents of a tier, in numbers."""

    num_templates: int
    num_bytes: int


@dataclass(frozen=True)
class Stored:
    """One template in a tier of files."""

    name: str  # of its folder, a digest of the key
    num_bytes: int
    used: float  # time of the last use
    is_asked_for: bool = False  # by a client; such a template does not expire


class SpanSource(Protocol):
    """A place from which spans are copied. All methods are thread-safe."""

    @property
    def name(self) -> TierName: ...

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """The spans that are not there."""

    def load(self, key: Key, steps: range) -> Span | None:
        """The span, if it is there and undamaged."""


class Tier(SpanSource, Protocol):
    """A place in which spans are kept."""

    max_bytes: int
    num_evictions: int
    spill: Spill

    def reserve(self, key: Key, num_bytes: int) -> None:
        """Make room for a whole template of `num_bytes`, or raise a CacheError."""

    def store(self, key: Key, span: Span) -> None:
        """Keep a copy of the span, or raise a CacheError."""

    def pin(self, key: Key) -> AbstractContextManager[None]:
        """Keep the template from being evicted until the block ends."""

    def drop(self, key: Key) -> bool:
        """Remove the template, pinned or not, and return whether it is gone for certain. Spans that were loaded stay
        valid."""

    def num_bytes(self, key: Key) -> int: ...

    def usage(self) -> Usage: ...


class LastingTier(Tier, Protocol):
    """A tier that outlives the process. It keeps pictures, too, so that a template can be used without its picture."""

    def store_picture(self, key: Key, picture: Pixels) -> None:
        """Keep the picture beside the template's spans until they are removed, or raise a CacheError."""

    def load_picture(self, key: Key) -> Pixels | None:
        """The picture, if it is there and undamaged."""

    def pictures(self) -> Mapping[Key, tuple[int, int]]:
        """The (height, width) of all pictures."""

    def mark_asked_for(self, key: Key) -> None:
        """Note that a client asked for the template, so that it does not expire. Or raise a CacheError."""

    def expire(self, before: float) -> list[str]:
        """Remove the templates that nobody asked for and nobody used since a time. Return their names."""

    def touch(self, key: Key) -> None:
        """Note that the template is in use, if it is there."""


def keep_nothing(_: Key) -> None:
    """The default `spill`: evicted templates are lost."""


def total(stored: Iterable[Stored]) -> int:
    return sum(template.num_bytes for template in stored)


def estimate(key: Key, span: Span) -> int:
    """Bytes of the whole template, extrapolated from one span."""
    return span.num_bytes * key.num_kept // len(span.steps)

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


class Tier(Protocol):
    """All methods are thread-safe."""

    @property
    def name(self) -> TierName: ...

    max_bytes: int
    num_evictions: int
    spill: Spill

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """The spans that are not there."""

    def load(self, key: Key, steps: range) -> Span | None:
        """The span, if it is there and undamaged."""

    def reserve(self, key: Key, num_bytes: int) -> None:
        """Make room for a whole template of `num_bytes`, or raise a CacheError."""

    def store(self, key: Key, span: Span) -> None:
        """Keep a copy of the span, or raise a CacheError."""

    def pin(self, key: Key) -> AbstractContextManager[None]:
        """Keep the template from being evicted until the block ends."""

    def drop(self, key: Key) -> None:
        """Remove the template, pinned or not. Spans that were loaded stay valid."""

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


def keep_nothing(_: Key) -> None:
    """The default `spill`: evicted templates are lost."""


def total(stored: Iterable[Stored]) -> int:
    return sum(template.num_bytes for template in stored)


def estimate(key: Key, span: Span) -> int:
    """Bytes of the whole template, extrapolated from one span."""
    return span.num_bytes * key.num_steps // len(span.steps)

"""Fetches of templates into a worker's memory: how long they take, as measured, which are on their way, and which
templates a worker can copy from its peers. Knows numbers and ids."""

from collections import defaultdict
from dataclasses import dataclass, field

from instgenie.types import TierName

PRIOR_BYTES = 64e6  # of an invented fetch that took as long as is typical; small ones say little about a rate
FADING = 0.9  # weight of a fetch after one more


class FetchRates:
    """Measured seconds per byte, by tier. A worker that has fetched little is judged by the common rates."""

    def __init__(self, common: "FetchRates | None" = None) -> None:
        self.common = common
        self._bytes: defaultdict[TierName, float] = defaultdict(float)
        self._seconds: defaultdict[TierName, float] = defaultdict(float)

    def measure(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        """Note a fetch that took `seconds` beside its fixed time."""
        self._bytes[tier] = FADING * self._bytes[tier] + num_bytes
        self._seconds[tier] = FADING * self._seconds[tier] + max(seconds, 0.0)
        if self.common:
            self.common.measure(tier, num_bytes, seconds)

    def per_byte(self, tier: TierName, typical: float) -> float:
        """Expected seconds per byte, given what is typical of the tier."""
        prior = self.common.per_byte(tier, typical) if self.common else typical
        if tier not in self._bytes:
            return prior
        return (PRIOR_BYTES * prior + self._seconds[tier]) / (PRIOR_BYTES + self._bytes[tier])


class PeerMap:
    """The templates that some worker has in memory and gives to others; one for all workers of a cluster."""

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {}  # by template: workers that could not copy it

    def renew(self, template: str) -> None:
        """Note that a worker has a template which others may copy: all of them may try."""
        self._held[template] = set()

    def drop(self, template: str) -> None:
        """Note that nobody has a template any more."""
        self._held.pop(template, None)

    def fail(self, template: str, worker: int) -> None:
        """Note that a worker could not copy a template, though others have it."""
        if template in self._held:
            self._held[template].add(worker)

    def serves(self, template: str, worker: int) -> bool:
        """True if a worker can copy a template, as far as is known."""
        failed = self._held.get(template)
        return failed is not None and worker not in failed


@dataclass
class NodeLink:
    """Templates on their way to the workers of one node, which share its network link and its disk: the next one comes
    behind them. Without this, edits would crowd onto links that are long full."""

    fetching: dict[tuple[int, str], float] = field(default_factory=dict)  # predicted seconds, by worker and template
    foreign: dict[int, float] = field(default_factory=dict)  # seconds of what other fronts wait for, by worker

    @property
    def seconds(self) -> float:
        return sum(self.fetching.values()) + sum(self.foreign.values())

    def seconds_of(self, worker: int) -> float:
        """Seconds of what this front waits for at a worker."""
        return sum(seconds for (other, _), seconds in self.fetching.items() if other == worker)

    def drop(self, worker: int) -> None:
        """Note that nothing is on its way to a worker any more."""
        self.foreign.pop(worker, None)
        for key in [key for key in self.fetching if key[0] == worker]:
            del self.fetching[key]

"""The adapters that are near the steps of a worker, and how long it takes to load others: LoRAs or ControlNets. Knows
numbers and versions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TYPICAL = 1e-9  # seconds per byte, from a local disk
PRIOR_BYTES = 64e6  # of an invented load that took as long as is typical
FADING = 0.9  # weight of a load after one more

SizedAdapter = tuple[str, int]  # version and bytes


@dataclass
class AdapterHoldings:
    versions: set[str] = field(default_factory=set)
    _bytes: float = 0.0
    _seconds: float = 0.0

    def measure(self, num_bytes: int, seconds: float) -> None:
        self._bytes = FADING * self._bytes + num_bytes
        self._seconds = FADING * self._seconds + seconds

    @property
    def per_byte(self) -> float:
        return (PRIOR_BYTES * TYPICAL + self._seconds) / (PRIOR_BYTES + self._bytes)

    def load_seconds(self, adapters: Sequence[SizedAdapter]) -> float:
        """Seconds until all of them are near the steps."""
        return self.per_byte * sum(num_bytes for version, num_bytes in adapters if version not in self.versions)

    def expect(self, adapters: Iterable[SizedAdapter]) -> None:
        """Note that adapters are on their way."""
        self.versions.update(version for version, _ in adapters)

    def hold(self, versions: Iterable[str]) -> None:
        """Replace what is known by what a process tells."""
        self.versions = set(versions)

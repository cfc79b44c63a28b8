"""The LoRAs that a worker has near its steps, and how long it takes to load others. Knows numbers and versions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TYPICAL = 1e-9  # seconds per byte, from a local disk
PRIOR_BYTES = 64e6  # of an invented load that took as long as is typical
FADING = 0.9  # weight of a load after one more

SizedLora = tuple[str, int]  # version and bytes


@dataclass
class LoraHoldings:
    versions: set[str] = field(default_factory=set)
    _bytes: float = 0.0
    _seconds: float = 0.0

    def measure(self, num_bytes: int, seconds: float) -> None:
        self._bytes = FADING * self._bytes + num_bytes
        self._seconds = FADING * self._seconds + seconds

    @property
    def per_byte(self) -> float:
        return (PRIOR_BYTES * TYPICAL + self._seconds) / (PRIOR_BYTES + self._bytes)

    def load_seconds(self, loras: Sequence[SizedLora]) -> float:
        """Seconds until all of them are near the steps."""
        return self.per_byte * sum(num_bytes for version, num_bytes in loras if version not in self.versions)

    def expect(self, loras: Iterable[SizedLora]) -> None:
        """Note that LoRAs are on their way."""
        self.versions.update(version for version, _ in loras)

    def hold(self, versions: Iterable[str]) -> None:
        """Replace what is known by what the worker tells."""
        self.versions = set(versions)

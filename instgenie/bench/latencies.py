"""Mean and quantiles of the latencies of many edits."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Latencies:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Latencies":
        quantiles = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.95, 0.99)))
        return cls(statistics.fmean(values), *quantiles)

    @property
    def figures(self) -> dict[str, float]:
        """The same as columns of a JSON row, to the millisecond."""
        names = {"mean_s": self.mean, "median_s": self.p50, "p90_s": self.p90, "p95_s": self.p95, "p99_s": self.p99}
        return {name: round(seconds, 3) for name, seconds in names.items()}

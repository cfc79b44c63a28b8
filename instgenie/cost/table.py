"""What a step costs on one worker, as a small table: made once where the model is, read at every choice of a worker.
Knows numbers; who makes the table knows the planner.

A step has two streams, one computes and one loads, and takes as long as the longer one. What its jobs add to each is
summed up; the constant of a step is paid once, however many jobs share it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from instgenie.types import TierName

SECONDS_PER_STEP = 0.01
SECONDS_PER_TOKEN = 1e-5


class Price(NamedTuple):
    """Seconds that a job adds to a step."""

    compute: float
    load: float

    def times(self, share: float) -> "Price":
        return Price(share * self.compute, share * self.load)


def mix(first: Price, second: Price, share: float) -> Price:
    """So much of the first, and the rest of the second."""
    rest = 1 - share
    return Price(share * first.compute + rest * second.compute, share * first.load + rest * second.load)


class StepCosts(Struct, frozen=True):
    """Of jobs of one size; others cost in proportion to their tokens."""

    num_tokens: int
    per_step: float  # seconds, however many jobs share the step
    ratios: tuple[float, ...]  # of masked tokens, rising from 0 to 1
    gpu: tuple[Price, ...]  # of a job at each ratio whose activations are where it is computed
    host: tuple[Price, ...]  # that reads them from the host's memory while it runs
    dense: Price  # of a job without activations
    bytes_per_token: float = 0.0  # that activations keep of a step
    fetch: dict[TierName, tuple[float, float]] = {}  # into memory, by tier: seconds of each, and of each byte

    def price(self, num_tokens: float, num_masked: float, tier: TierName | None) -> Price:
        """Of a job whose activations lie in a tier; None: it has none. What lies below memory is brought there."""
        if tier is None or not num_tokens:
            return self.dense.times(num_tokens / self.num_tokens)
        column = self.gpu if tier == "gpu" else self.host
        ratio = min(num_masked / num_tokens, 1.0)
        above = bisect_right(self.ratios, ratio, 1, len(self.ratios) - 1)
        low, high = self.ratios[above - 1], self.ratios[above]
        return mix(column[above], column[above - 1], (ratio - low) / (high - low)).times(num_tokens / self.num_tokens)

    def mean_price(
        self, num_tokens: float, num_masked: float, tier: TierName | None, num_dense: int, num_steps: int
    ) -> Price:
        """Of a step of a job, in the mean over so many, of which the first are dense."""
        dense, cached = self.price(num_tokens, num_tokens, None), self.price(num_tokens, num_masked, tier)
        return mix(dense, cached, num_dense / num_steps)

    def step(self, prices: Iterable[Price]) -> float:
        """Seconds of one step of these jobs together."""
        return self.total(1, *map(sum, zip((0.0, 0.0), *prices, strict=True)))

    def total(self, num_steps: float, compute: float, load: float) -> float:
        """Seconds of so many steps, in which jobs compute and load for so long."""
        return max(num_steps * self.per_step + compute, load)

    def fetch_seconds(self, num_tokens: float, num_steps: int, tier: TierName | None) -> float:
        """Until a template's activations are in memory."""
        if tier is None or tier not in self.fetch:
            return 0.0
        each, byte = self.fetch[tier]
        return each + byte * self.bytes_per_token * num_tokens * num_steps


def line_costs(per_step: float, per_token: float) -> StepCosts:
    """Of steps that take so long, and so much longer for each token they compute; loads take no time."""
    dense = Price(per_token, 0.0)
    return StepCosts(1, per_step, (0.0, 1.0), (Price(0.0, 0.0), dense), (Price(0.0, 0.0), dense), dense)


USUAL = line_costs(SECONDS_PER_STEP, SECONDS_PER_TOKEN)  # of a worker that has not said what its steps cost

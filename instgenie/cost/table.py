"""The cost of a step on one worker, as a small table: made once where the model is, read whenever a worker is chosen
or a job is admitted. Knows numbers only; `pricing` makes the table.

A step has two streams, one that computes and one that loads, and takes as long as the longer of them. Each job adds its
price to both streams; a step's fixed cost is paid once, however many jobs share it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from instgenie.cost.kept_steps import stride_of
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
    """The weighted mean, `share` being the weight of the first."""
    rest = 1 - share
    return Price(share * first.compute + rest * second.compute, share * first.load + rest * second.load)


class StepCosts(Struct, frozen=True):
    """Prices of jobs of one size; a job of another size is priced in proportion to its tokens."""

    num_tokens: int
    per_step: float  # fixed seconds of a step
    ratios: tuple[float, ...]  # mask ratios, rising from 0 to 1
    gpu: tuple[Price, ...]  # per ratio: a job whose activations are in the memory of the device
    host: tuple[Price, ...]  # per ratio: a job that reads its activations from main memory as it runs
    dense: Price  # a job without activations
    bytes_per_token: float = 0.0  # of the activations of one kept step
    stride: int = 1  # every so many steps are kept; 0: see `stride_of`
    num_text: int = 0  # text tokens whose rows are kept beside those of the image
    fetch: dict[
        TierName, tuple[float, float]
    ] = {}  # by tier: typical seconds to fetch a template into memory, fixed and per byte

    def price(self, num_tokens: float, num_masked: float, tier: TierName | None) -> Price:
        """Price of a step of a job whose activations are in a tier; None if it has none. Activations below memory are
        fetched into main memory first, so they are priced as if they were there."""
        scale = num_tokens / self.num_tokens
        if tier is None or not num_tokens:
            return self.dense.times(scale)
        column, ratios = self.gpu if tier == "gpu" else self.host, self.ratios
        ratio = num_masked / num_tokens if num_masked < num_tokens else 1.0
        above = bisect_right(ratios, ratio, 1, len(ratios) - 1)
        low = ratios[above - 1]
        share = scale * (ratio - low) / (ratios[above] - low)
        (compute, load), (compute_below, load_below), rest = column[above], column[above - 1], scale - share
        return Price(share * compute + rest * compute_below, share * load + rest * load_below)

    def mean_price(
        self, num_tokens: float, num_masked: float, tier: TierName | None, num_dense: int, num_steps: int
    ) -> Price:
        """Mean price per step over `num_steps`, the first `num_dense` being dense."""
        dense, cached = self.price(num_tokens, num_tokens, None), self.price(num_tokens, num_masked, tier)
        return mix(dense, cached, num_dense / num_steps)

    def own_price(self, num_tokens: float, num_masked: float, own_share: float) -> Price:
        """Mean price per step of a job that computes every token at a share of its steps, and at the others reads what
        these left in the memory of the device."""
        (dense, dense_load), (cached, cached_load) = self.dense, self.price(num_tokens, num_masked, "gpu")
        share, rest = own_share * num_tokens / self.num_tokens, 1 - own_share
        return Price(share * dense + rest * cached, share * dense_load + rest * cached_load)

    def step_seconds(self, prices: Iterable[Price]) -> float:
        """Seconds of one step of these jobs together."""
        return self.total_seconds(1, *map(sum, zip((0.0, 0.0), *prices, strict=True)))

    def total_seconds(self, num_steps: float, compute: float, load: float) -> float:
        """Seconds of `num_steps` steps, given the sums of the prices of all their jobs."""
        return max(num_steps * self.per_step + compute, load)

    def fetch_seconds(self, num_tokens: float, num_steps: int, tier: TierName | None) -> float:
        """Typical seconds until a template's activations are in memory."""
        if tier is None or tier not in self.fetch:
            return 0.0
        fixed, per_byte = self.fetch[tier]
        return fixed + per_byte * self.template_bytes(num_tokens, num_steps)

    def num_kept(self, num_steps: int) -> int:
        """Steps that a registration computes and keeps."""
        return -(-num_steps // stride_of(self.stride, num_steps))

    def template_bytes(self, num_tokens: float, num_steps: int) -> float:
        """Bytes of a template's activations."""
        return self.bytes_per_token * (num_tokens + self.num_text) * self.num_kept(num_steps)


def linear_costs(per_step: float, per_token: float) -> StepCosts:
    """Costs of steps that take `per_step` seconds and `per_token` more for each token computed; loads are free."""
    dense = Price(per_token, 0.0)
    return StepCosts(1, per_step, (0.0, 1.0), (Price(0.0, 0.0), dense), (Price(0.0, 0.0), dense), dense)


DEFAULT_COSTS = linear_costs(SECONDS_PER_STEP, SECONDS_PER_TOKEN)  # for a worker that has not reported its costs yet

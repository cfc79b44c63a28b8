"""The cost of a step on one worker, as a small table: made once where the model is, read whenever a worker is chosen
or a job is admitted. Knows numbers only; `pricing` makes the table.

A step has two streams, one that computes and one that loads, and takes as long as the longer of them. Each job adds its
price to both streams; a step's fixed cost is paid once, however many jobs share it, and once more where dense jobs run
in a pass of their own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
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
    dense: float = 0.0  # share of its steps that compute every token

    def times(self, share: float) -> "Price":
        return Price(share * self.compute, share * self.load, self.dense)


def mix(first: Price, second: Price, share: float) -> Price:
    """The weighted mean, `share` being the weight of the first."""
    rest = 1 - share
    return Price(*(share * one + rest * other for one, other in zip(first, second, strict=True)))


class ControlPrice(NamedTuple):
    """What a ControlNet takes for a step of a job of the table's size."""

    seconds: float
    device: str = ""  # on which it runs; those on one device take turns. Empty: that of the steps, which wait for it
    hidden: float = 0.0  # share of a job's computing that runs beside it, if it has a device of its own


class Guided(NamedTuple):
    """A ControlNet that guides an edit."""

    version: str
    share: float = 1.0  # of the steps that it guides


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
    ratio: float = 1.0  # measured to predicted seconds of a step, at the time of the first correction of this table
    per_job: float = 0.0  # fixed seconds of a job in a step, whatever its size
    per_pass: float = 0.0  # fixed seconds of a second pass, if dense jobs run apart from those that read activations
    fetch: dict[
        TierName, tuple[float, float]
    ] = {}  # by tier: typical seconds to fetch a template into memory, fixed and per byte
    controls: Mapping[str, ControlPrice] = {}  # of the ControlNets that edits may name, by version

    def price(self, num_tokens: float, num_masked: float, tier: TierName | None) -> Price:
        """Price of a step of a job whose activations are in a tier; None if it has none. Activations below memory are
        fetched into main memory first, so they are priced as if they were there."""
        scale = num_tokens / self.num_tokens
        if tier is None or not num_tokens:
            return Price(self.per_job + scale * self.dense.compute, scale * self.dense.load, 1.0)
        column, ratios = self.gpu if tier == "gpu" else self.host, self.ratios
        ratio = num_masked / num_tokens if num_masked < num_tokens else 1.0
        above = bisect_right(ratios, ratio, 1, len(ratios) - 1)
        low = ratios[above - 1]
        share = scale * (ratio - low) / (ratios[above] - low)
        (compute, load, _), (compute_below, load_below, _), rest = column[above], column[above - 1], scale - share
        return Price(self.per_job + share * compute + rest * compute_below, share * load + rest * load_below)

    def mean_price(
        self, num_tokens: float, num_masked: float, tier: TierName | None, num_dense: int, num_steps: int
    ) -> Price:
        """Mean price per step over `num_steps`, the first `num_dense` being dense."""
        dense, cached = self.price(num_tokens, num_tokens, None), self.price(num_tokens, num_masked, tier)
        return mix(dense, cached, num_dense / num_steps)

    def own_price(self, num_tokens: float, num_masked: float, own_share: float) -> Price:
        """Mean price per step of a job that computes every token at a share of its steps, and at the others reads what
        these left in the memory of the device."""
        (dense, dense_load, _), (cached, cached_load, _) = self.dense, self.price(num_tokens, num_masked, "gpu")
        share, rest = own_share * num_tokens / self.num_tokens, 1 - own_share
        compute = own_share * self.per_job + share * dense + rest * cached
        return Price(compute, share * dense_load + rest * cached_load, own_share)

    def guided(self, price: Price, num_tokens: float, controls: Iterable[Guided]) -> Price:
        """The price of a job with what its ControlNets add."""
        return price._replace(compute=price.compute + self.control_seconds(price, num_tokens, controls))

    def control_seconds(self, price: Price, num_tokens: float, controls: Iterable[Guided]) -> float:
        """Seconds that ControlNets add to a step of a job at a price. On the device of the steps they add up. On
        another one they run beside the first part of the job's computing, and the step waits for the rest."""
        own = hidden = 0.0
        beside: dict[str, float] = {}
        for version, share in controls:
            if found := self.controls.get(version):
                seconds = share * found.seconds * num_tokens / self.num_tokens
                hidden = max(hidden, share * found.hidden)
                if found.device:
                    beside[found.device] = beside.get(found.device, 0.0) + seconds
                else:
                    own += seconds
        return own + max(max(beside.values(), default=0.0) - hidden * price.compute, 0.0)

    def step_seconds(self, prices: Iterable[Price]) -> float:
        """Seconds of one step of these jobs together."""
        all_prices = list(prices)
        compute, load = (sum(price[stream] for price in all_prices) for stream in (0, 1))
        return self.total_seconds(1, compute + self.per_pass * self.num_more_passes(all_prices), load)

    def seconds_as_jobs_leave(self, prices: Sequence[Price]) -> list[float]:
        """Seconds of one step of all these jobs, then of all but the first, and so on to the last one alone."""
        compute = load = 0.0
        none_dense = all_dense = 1.0
        seconds = []
        for one, other, dense in reversed(prices):
            compute += one
            load += other
            none_dense *= 1 - dense
            all_dense *= dense
            passes = self.per_pass * max(1 - none_dense - all_dense, 0.0)
            seconds.append(max(self.per_step + passes + compute, load))
        seconds.reverse()
        return seconds

    def num_more_passes(self, prices: Iterable[Price]) -> float:
        """Passes of a step beyond the first: one if some of these jobs are dense and others are not, and dense jobs
        run apart. Where shares of their steps are dense, these count as chances."""
        if not self.per_pass:
            return 0.0
        none_dense = all_dense = 1.0
        for price in prices:
            none_dense *= 1 - price.dense
            all_dense *= price.dense
        return max(1 - none_dense - all_dense, 0.0)

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

"""Service times: how long the parts of an edit take. Knows latency models and the planner, and no clock.

The seconds of a step depend on its jobs only through sums per picture size: the number of cached jobs, their masked
tokens, and the number of dense jobs. So a step is planned once for equal sums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from instgenie.cluster.config import finish_period
from instgenie.cost.latency import Latency
from instgenie.cost.network import Demand
from instgenie.cost.planner import plan_batch
from instgenie.cost.pricing import JobShape, make_costs
from instgenie.cost.table import DEFAULT_COSTS, StepCosts, linear_costs
from instgenie.types import PlanPolicy

Sums = tuple[tuple[int, int, int, int], ...]  # per size: tokens of a job, cached jobs, their masked tokens, dense jobs
NUM_GRAINS = 256  # masked tokens are rounded to this fraction of a picture


@dataclass(frozen=True)
class SideSeconds:
    """Seconds of the stages before and after the steps of an edit."""

    prepare: float = 0.0
    decode: float = 0.0
    decode_token: float = 0.0  # added per masked token: only the masked part, with its surroundings, is decoded
    between: float = 0.0  # from the end of a step to the begin of the next
    finish_thread: float = 0.0  # after decoding, in a thread, while the next edit can be decoded

    def decode_seconds(self, num_masked: int) -> float:
        return self.decode + self.decode_token * num_masked

    def finish_seconds(self, num_masked: int) -> float:
        return self.decode_seconds(num_masked) + self.finish_thread

    def period(self, num_masked: int) -> float:
        """Seconds from one finished edit to the next in a long queue of edits with `num_masked` masked tokens each."""
        return finish_period(self.decode_seconds(num_masked), self.finish_thread)


NO_SIDE_SECONDS = SideSeconds()


class Service(Protocol):
    @property
    def side(self) -> SideSeconds:
        """Times of the stages beside the steps, the same for every edit."""

    def step(self, sums: Sums) -> float:
        """Seconds of one step of a batch."""

    def costs(self, num_tokens: int) -> StepCosts:
        """Step costs that the router is told, for jobs of `num_tokens` tokens."""


@dataclass(frozen=True)
class LinearService:
    """A step takes `per_step` seconds and `per_token` more for each token it computes."""

    per_step: float
    per_token: float
    side: SideSeconds = NO_SIDE_SECONDS

    def step(self, sums: Sums) -> float:
        tokens = sum(masked + num_tokens * num_dense for num_tokens, _, masked, num_dense in sums)
        return self.per_step + self.per_token * tokens

    def costs(self, num_tokens: int) -> StepCosts:
        return linear_costs(self.per_step, self.per_token)


@dataclass(frozen=True)
class MeasuredService:
    """A step takes the seconds measured for its number of jobs, whatever is masked. Between measured numbers, and
    beyond the last, it is on the line through the two nearest."""

    seconds: Mapping[int, float]  # by number of jobs
    side: SideSeconds = NO_SIDE_SECONDS

    def step(self, sums: Sums) -> float:
        num_jobs = sum(num_cached + num_dense for _, num_cached, _, num_dense in sums)
        known = sorted(self.seconds)
        if len(known) == 1:
            return self.seconds[known[0]]
        below = max((num for num in known[:-1] if num <= num_jobs), default=known[0])
        above = known[known.index(below) + 1]
        share = max(num_jobs - below, 0) / (above - below)
        return (1 - share) * self.seconds[below] + share * self.seconds[above]

    def costs(self, num_tokens: int) -> StepCosts:
        """The default costs, which the router corrects by measured steps: the measurements say nothing about masks."""
        return DEFAULT_COSTS


class PlannedService:
    """A step takes as long as the planner predicts for a device, with activations loaded from main memory during the
    step or, if `in_gpu`, already there."""

    def __init__(
        self,
        latency: Latency,
        shape: JobShape,
        side: SideSeconds = NO_SIDE_SECONDS,
        policy: PlanPolicy = "exact",
        in_gpu: bool = False,
    ) -> None:
        self.latency, self.shape, self.side, self.policy, self.in_gpu = latency, shape, side, policy, in_gpu
        self._seconds = lru_cache(maxsize=None)(self.plan)

    def step(self, sums: Sums) -> float:
        return self._seconds(tuple(rounded(*one) for one in sums))

    def plan(self, sums: Sums) -> float:
        demands = [demand for one in sums for demand in self.demands(*one)]
        planned = plan_batch(self.shape.network, demands, self.latency, policy=self.policy)
        return planned.seconds + self.latency.outside(self.shape.network, demands, planned.plan)

    def demands(self, num_tokens: int, num_cached: int, num_masked: int, num_dense: int) -> Iterable[Demand]:
        """Demands of jobs that share the masked tokens equally; their total is that of the real jobs."""
        for job in range(num_cached):
            yield self.shape.demand(num_tokens, (num_masked + job) // num_cached, self.in_gpu)
        for _ in range(num_dense):
            yield self.shape.dense_demand(num_tokens)

    def costs(self, num_tokens: int) -> StepCosts:
        return make_costs(self.shape, self.latency, self.policy, num_tokens, is_host_near=self.in_gpu)


def rounded(num_tokens: int, num_cached: int, num_masked: int, num_dense: int) -> tuple[int, int, int, int]:
    grain = max(num_tokens // NUM_GRAINS, 1)
    return num_tokens, num_cached, grain * round(num_masked / grain), num_dense

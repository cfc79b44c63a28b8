"""How long the parts of an edit take. Knows latency models and the planner; knows no time of day.

The seconds of a step depend on its jobs through sums alone: of one size, so many cached jobs with so many masked tokens
together and so many dense ones. So equal sums are planned once.
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
from instgenie.cost.table import USUAL, StepCosts, line_costs
from instgenie.types import PlanPolicy

Sums = tuple[tuple[int, int, int, int], ...]  # of each size: tokens of a job; cached jobs, their masked tokens; others
NUM_GRAINS = 256  # masked tokens are counted in this share of a picture


@dataclass(frozen=True)
class Chores:
    """Seconds of what comes before and after the steps of an edit."""

    prepare: float = 0.0
    decode: float = 0.0
    decode_token: float = 0.0  # more for each masked token: what is masked is decoded, with what is around it
    finish_thread: float = 0.0  # after them, of a thread, in which the next edit can be decoded

    def decode_seconds(self, num_masked: int) -> float:
        return self.decode + self.decode_token * num_masked

    def finish_seconds(self, num_masked: int) -> float:
        return self.decode_seconds(num_masked) + self.finish_thread

    def period(self, num_masked: int) -> float:
        """From one finished edit to the next, where there are many with so many masked tokens."""
        return finish_period(self.decode_seconds(num_masked), self.finish_thread)


NO_CHORES = Chores()


class Service(Protocol):
    @property
    def chores(self) -> Chores:
        """Of every edit."""

    def step(self, sums: Sums) -> float:
        """Seconds of one step of a batch."""

    def costs(self, num_tokens: int) -> StepCosts:
        """What the router is told of steps of jobs of so many tokens."""


@dataclass(frozen=True)
class Line:
    """A step that takes so long, and so much longer for each token it computes."""

    per_step: float
    per_token: float
    chores: Chores = NO_CHORES

    def step(self, sums: Sums) -> float:
        tokens = sum(masked + num_tokens * num_dense for num_tokens, _, masked, num_dense in sums)
        return self.per_step + self.per_token * tokens

    def costs(self, num_tokens: int) -> StepCosts:
        return line_costs(self.per_step, self.per_token)


@dataclass(frozen=True)
class Measured:
    """A step that takes what was measured for so many jobs, whatever is masked; between two numbers, and beyond the
    last, along the line through the two that are next."""

    seconds: Mapping[int, float]  # by number of jobs
    chores: Chores = NO_CHORES

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
        """Measured steps say nothing of masks: what is usual is scaled by what happens."""
        return USUAL


class Planned:
    """A step as the planner plans it on a device, for what is loaded from memory meanwhile or is there already."""

    def __init__(
        self,
        latency: Latency,
        shape: JobShape,
        chores: Chores = NO_CHORES,
        policy: PlanPolicy = "exact",
        in_gpu: bool = False,
    ) -> None:
        self.latency, self.shape, self.chores, self.policy, self.in_gpu = latency, shape, chores, policy, in_gpu
        self._seconds = lru_cache(maxsize=None)(self.plan)

    def step(self, sums: Sums) -> float:
        return self._seconds(tuple(rounded(*one) for one in sums))

    def plan(self, sums: Sums) -> float:
        demands = [demand for one in sums for demand in self.demands(*one)]
        planned = plan_batch(self.shape.network, demands, self.latency, policy=self.policy)
        return planned.seconds + self.latency.outside(self.shape.network, demands)

    def demands(self, num_tokens: int, num_cached: int, num_masked: int, num_dense: int) -> Iterable[Demand]:
        """Jobs with an equal share of the masked tokens each; what they compute is the same in all."""
        for job in range(num_cached):
            yield self.shape.demand(num_tokens, (num_masked + job) // num_cached, self.in_gpu)
        for _ in range(num_dense):
            yield self.shape.dense_demand(num_tokens)

    def costs(self, num_tokens: int) -> StepCosts:
        return make_costs(self.shape, self.latency, self.policy, num_tokens, is_host_near=self.in_gpu)


def rounded(num_tokens: int, num_cached: int, num_masked: int, num_dense: int) -> tuple[int, int, int, int]:
    grain = max(num_tokens // NUM_GRAINS, 1)
    return num_tokens, num_cached, grain * round(num_masked / grain), num_dense

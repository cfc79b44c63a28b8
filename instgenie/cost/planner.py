"""The planner: chooses a plan for a batch by a named policy and says how long it takes. Knows costs; knows no tensor.

`exact` is the fastest plan there is. The other policies are there to compare with: the paper's Algorithm 1 (`greedy`),
everything cached with loads hidden behind compute (`cached`) or not (`naive`), and everything dense (`dense`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instgenie.cost.latency import BlockCost, Latency, makespan
from instgenie.cost.network import Demand, NetworkShape
from instgenie.cost.plan import Plan
from instgenie.cost.search import fastest_plan, greedy_plan
from instgenie.types import Kind, PlanPolicy

DENSE_CONVOLUTIONS = (False,)  # a plan with any dense block


@dataclass(frozen=True)
class Planned:
    """A plan and its time."""

    plan: Plan
    seconds: float  # until the last compute ends
    lead: float  # seconds that loading is ahead of computing then: it may load for the next step


def plan_batch(
    network: NetworkShape, demands: Sequence[Demand], latency: Latency, lead: float = 0.0, policy: PlanPolicy = "exact"
) -> Planned:
    """One plan for all jobs of a batch. Jobs without activations are dense in any plan; if any job has `kv`, the plan
    must be feasible with `kv`. Convolutions compute masked tiles alone if every block is cached: such a plan is chosen
    if what it saves there, and loads, makes it the faster one."""
    kinds = {demand.kind for demand in demands}
    costs = latency.block_costs(network, demands, DENSE_CONVOLUTIONS)
    if kinds == {None}:
        return plan_dense(costs, "kv", network.run_lengths, lead)
    kind: Kind = "kv" if "kv" in kinds else "y"
    planned = POLICIES[policy](costs, kind, network.run_lengths, lead)
    if policy == "dense" or not any(demand.active is not None for demand in demands):
        return planned
    plan_whole = plan_naive if policy == "naive" else plan_cached
    whole = plan_whole(latency.block_costs(network, demands), kind, network.run_lengths, lead)
    saved = latency.outside(network, demands, DENSE_CONVOLUTIONS) - latency.outside(network, demands)
    return whole if all(planned.plan) or whole.seconds - saved <= planned.seconds else planned


def plan_exact(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float = 0.0) -> Planned:
    return time_plan(fastest_plan(costs, kind, run_lengths, lead), costs, lead)


def plan_greedy(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float = 0.0) -> Planned:
    return time_plan(greedy_plan(costs, kind, run_lengths, lead), costs, lead)


def plan_cached(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float = 0.0) -> Planned:
    return time_plan((True,) * len(costs), costs, lead)


def plan_naive(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float = 0.0) -> Planned:
    """Every block is loaded, then computed; nothing runs side by side."""
    return Planned((True,) * len(costs), sum(cost.load + cost.cached for cost in costs), 0.0)


def plan_dense(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float = 0.0) -> Planned:
    return time_plan((False,) * len(costs), costs, lead)


MakePlan = Callable[[Sequence[BlockCost], Kind, Sequence[int], float], Planned]
POLICIES: dict[PlanPolicy, MakePlan] = {
    "exact": plan_exact,
    "greedy": plan_greedy,
    "cached": plan_cached,
    "naive": plan_naive,
    "dense": plan_dense,
}


def time_plan(plan: Plan, costs: Sequence[BlockCost], lead: float) -> Planned:
    seconds = makespan(plan, costs, lead)
    loading = sum(cost.load for cached, cost in zip(plan, costs, strict=True) if cached)
    return Planned(plan, seconds, seconds + lead - loading)

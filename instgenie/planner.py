"""Plans: for each block, cached or dense. Knows which plans are feasible and which is fastest; knows no tensor.

`plan_exact` is a dynamic programme. After some blocks nothing matters but where the two streams are, the one that loads
and the one that computes, and whether the last block was cached. Of all plans that lead to such a place, those that are
behind another in both streams are dropped, and those that cannot end before the best plan known. What is left is exact.
The other policies stand beside it to compare with: the paper's Algorithm 1 (`plan_greedy`), everything cached, with
loads hidden (`plan_cached`) or not (`plan_naive`), and everything dense.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

from instgenie.errors import PlanError
from instgenie.latency import BlockCost, Latency, makespan, unit_starts
from instgenie.network import Demand, NetworkShape
from instgenie.types import Kind

Plan = tuple[bool, ...]  # for each block: cached or not
DENSE: Plan = ()  # of a job without activations: no block is cached, however many there are
State = tuple[float, float, int, Any]  # where loading and computing are; what has turned; the path there, backwards
NUM_BISECTIONS = 12


def is_cached(plan: Plan, block: int) -> bool:
    """After the last block of a Flux come the velocities: of masked tokens alone if anything was cached."""
    return plan[block] if block < len(plan) else any(plan)


def check_plan(plan: Plan, kind: Kind, units: Sequence[int]) -> None:
    """Units are runs of blocks, given by their lengths, in which tokens that were dropped stay dropped."""
    if len(plan) != sum(units):
        raise PlanError(f"the plan has {len(plan)} blocks: {sum(units)}, as many as the model, are expected")
    if kind == "kv" and (turn := dense_after_cached(plan, units)) is not None:
        cached, dense = turn
        raise PlanError(
            f"the plan runs block {dense} dense after block {cached} was cached: with kv, unmasked tokens "
            "that were dropped cannot come back; a dense prefix, then cached to the end, is expected"
            + (" of each transformer" if len(units) > 1 else "")
        )


def dense_after_cached(plan: Plan, units: Sequence[int]) -> tuple[int, int] | None:
    """The first cached block that has a dense one behind it in its unit, and that dense one."""
    for end, length in zip(accumulate(units), units, strict=True):
        blocks = range(end - length, end)
        cached = next((block for block in blocks if plan[block]), end)
        dense = next((block for block in range(cached, end) if not plan[block]), None)
        if dense is not None:
            return cached, dense
    return None


@dataclass(frozen=True)
class Planned:
    """A plan and what it takes."""

    plan: Plan
    seconds: float  # until the last compute ends
    lead: float  # by how much loading is ahead then: it may load for the step to come


def plan_batch(
    network: NetworkShape, demands: Sequence[Demand], latency: Latency, lead: float = 0.0, policy: str = "exact"
) -> Planned:
    """One plan for all jobs of a batch; those without activations are dense in any plan. Where any has `kv`, tokens
    that were dropped cannot come back."""
    kinds = {demand.kind for demand in demands}
    costs = latency.block_costs(network, demands)
    if kinds == {None}:
        return plan_dense(costs, "kv", network.units, lead)
    return POLICIES[policy](costs, "kv" if "kv" in kinds else "y", network.units, lead)


def plan_exact(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    known = min(
        plan_greedy(costs, kind, units, lead), plan_prefix(costs, kind, units, lead), key=lambda one: one.seconds
    )
    if kind == "kv" and len(units) == 1:
        return known  # a dense prefix is all there is
    # with y, where tokens come back at any time, every block is a unit
    found = search(costs, units if kind == "kv" else (1,) * len(costs), lead, known.seconds)
    return known if found is None else min(known, timed(found, costs, lead), key=lambda one: one.seconds)


def plan_greedy(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    """The paper's Algorithm 1: caches a block whenever that block then ends no later. With `kv`, where it cannot turn
    back, it goes on caching to the end of the unit."""
    starts = unit_starts(units)
    loaded, computed = -lead, 0.0
    plan: list[bool] = []
    for block, cost in enumerate(costs):
        is_held = kind == "kv" and block not in starts and plan[-1]
        cached_end = max(computed, loaded + cost.load) + cost.cached
        plan.append(is_held or cached_end <= computed + cost.dense)
        loaded, computed = (loaded + cost.load, cached_end) if plan[-1] else (loaded, computed + cost.dense)
    return timed(tuple(plan), costs, lead)


def plan_prefix(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    """The fastest dense prefix, then cached to the end; the fastest of all plans for a single unit of `kv`."""
    num_dense = len(costs)
    waits, after, before = -math.inf, 0.0, sum(cost.dense for cost in costs)
    best = before
    for block in range(len(costs) - 1, -1, -1):
        cost = costs[block]
        after += cost.cached
        before -= cost.dense
        # its own load, then all that computes from it on; whatever later blocks wait for comes later by its load
        waits = cost.load + max(waits, after)
        seconds = max(before + after, waits - lead)
        if seconds <= best:
            best, num_dense = seconds, block
    plan = (False,) * num_dense + (True,) * (len(costs) - num_dense)
    return timed(plan, costs, lead)


def plan_cached(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    return timed((True,) * len(costs), costs, lead)


def plan_naive(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    """Every block is loaded, then computed; nothing runs side by side."""
    return Planned((True,) * len(costs), sum(cost.load + cost.cached for cost in costs), 0.0)


def plan_dense(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    return timed((False,) * len(costs), costs, lead)


Policy = Callable[[Sequence[BlockCost], Kind, Sequence[int], float], Planned]
POLICIES: dict[str, Policy] = {
    "exact": plan_exact,
    "greedy": plan_greedy,
    "cached": plan_cached,
    "naive": plan_naive,
    "dense": plan_dense,
}


def timed(plan: Plan, costs: Sequence[BlockCost], lead: float) -> Planned:
    seconds = makespan(plan, costs, lead)
    loading = sum(cost.load for cached, cost in zip(plan, costs, strict=True) if cached)
    return Planned(plan, seconds, seconds + lead - loading)


def search(costs: Sequence[BlockCost], units: Sequence[int], lead: float, most: float) -> Plan | None:
    """The fastest plan that takes less than `most` seconds, if there is one."""
    share, still = bounds(costs, lead)
    least = list(accumulate((min(cost.cached, cost.dense) for cost in reversed(costs)), initial=0.0))[::-1]
    bits, turns = exchanges(costs, units)
    starts = unit_starts(units)
    free: list[State] = [(-lead, 0.0, 0, ())]  # nothing of the unit is cached yet
    held: list[State] = []  # the unit is cached from here on
    for block, (cached, dense, load) in enumerate(costs):
        bit, turn, limits = bits[block], turns[block], (share, most - still[block + 1], most - least[block + 1])
        stayed = [(at, end + dense, turned, (False, path)) for at, end, turned, path in free if not turned & bit]
        reached = [
            (now := at + load, (end if end > now else now) + cached, turned | turn, (True, path))
            for at, end, turned, path in free + held
        ]
        if block + 1 in starts:
            free, held = front(stayed + reached, *limits), []
        else:
            free, held = front(stayed, *limits), front(reached, *limits)
    ends = free + held
    return unwind(min(ends, key=itemgetter(1))[3]) if ends else None


def exchanges(costs: Sequence[BlockCost], units: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of two equal units, the earlier has at least as many dense blocks in some fastest plan: where it has fewer,
    exchanging the two lets every load end as early or earlier, and as much is computed. So, for each block: a bit,
    shared by all blocks at the same place of equal units, and the bits that caching it sets; where its bit is set, a
    block is cached."""
    names: dict[object, int] = {}
    bits, turns = [], []
    for end, length in zip(accumulate(units), units, strict=True):
        unit = tuple(costs[end - length : end])
        name: object = unit if all(cost.cached <= cost.dense for cost in unit) else end
        places = [1 << names.setdefault((name, place), len(names)) for place in range(length)]
        bits += places
        turns += [sum(places[place:]) for place in range(length)]
    return bits, turns


def front(states: list[State], share: float, most: float, most_computed: float) -> list[State]:
    """The states that no other is ahead of in both streams, and that can still end in time."""
    states.sort(key=itemgetter(0))  # two sorted runs, merged
    kept = []
    best, rest = most_computed, 1 - share
    for state in states:
        computed = state[1]
        if computed < best and share * state[0] + rest * computed < most:
            best = computed
            kept.append(state)
    return kept


def bounds(costs: Sequence[BlockCost], lead: float) -> tuple[float, list[float]]:
    """A share s and, for each block, a sum: from a place before that block no plan ends before
    s * loaded + (1 - s) * computed + sum, for a step is as long as either stream and so as any mean of the two."""
    low, high = 0.0, 1.0
    counts = Counter(costs).items()
    for _ in range(NUM_BISECTIONS):  # towards the share whose bound on the whole step is highest
        share = (low + high) / 2
        slope = -lead
        for (cached, dense, load), count in counts:
            slope += count * (load - cached if share * load + (1 - share) * cached < (1 - share) * dense else -dense)
        low, high = (share, high) if slope > 0 else (low, share)
    rest = [min(low * load + (1 - low) * cached, (1 - low) * dense) for cached, dense, load in reversed(costs)]
    return low, list(accumulate(rest, initial=0.0))[::-1]


def unwind(path: Any) -> Plan:
    plan = []
    while path:
        cached, path = path
        plan.append(cached)
    return tuple(reversed(plan))

"""Plans: for each block, cached or dense. Knows which plans are feasible and which is fastest; knows no tensor.

`plan_exact` is a dynamic programme over units. Behind some of them nothing matters but where the two streams are, the
one that loads and the one that computes. Of all plans so far, those that are behind another in both streams are
dropped, and those that cannot end before the best plan known. What is left is exact.
The other policies stand beside it to compare with: the paper's Algorithm 1 (`plan_greedy`), everything cached, with
loads hidden (`plan_cached`) or not (`plan_naive`), and everything dense.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter, or_
from typing import Any, NamedTuple

from instgenie.cost.latency import BlockCost, Latency, makespan, unit_starts
from instgenie.cost.network import Demand, NetworkShape
from instgenie.errors import PlanError
from instgenie.types import Kind, PlanPolicy

Plan = tuple[bool, ...]  # for each block: cached or not
DENSE: Plan = ()  # of a job without activations: no block is cached, however many there are
State = tuple[float, float, int, Any]  # where loading and computing are; bits; the path there, backwards
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
    network: NetworkShape, demands: Sequence[Demand], latency: Latency, lead: float = 0.0, policy: PlanPolicy = "exact"
) -> Planned:
    """One plan for all jobs of a batch; those without activations are dense in any plan. Where any has `kv`, tokens
    that were dropped cannot come back."""
    kinds = {demand.kind for demand in demands}
    costs = latency.block_costs(network, demands)
    if kinds == {None}:
        return plan_dense(costs, "kv", network.run_lengths, lead)
    return POLICIES[policy](costs, "kv" if "kv" in kinds else "y", network.run_lengths, lead)


def plan_exact(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    if kind == "kv" and len(units) == 1:
        return plan_prefix(costs, kind, units, lead)  # a dense prefix is all there is
    if kind == "y":  # tokens come back at any time; but of equal blocks in a row, the dense ones go first
        units = [len(list(run)) for _, run in groupby(costs)]
    options = list(make_options(costs, kind, units))
    known, most = dense_first(options, lead)
    tail = min(cost.cached for cost in costs)  # whatever is loaded last is computed behind that
    found = search(options, find_share(options, lead), tail, lead, most)
    return timed(unwind(found or known, units), costs, lead)


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
    options = unit_options(costs, [0] * len(costs))
    best = min(options, key=lambda option: max(option.compute, option.wait - lead))
    return timed((False,) * best.num_dense + (True,) * (len(costs) - best.num_dense), costs, lead)


def plan_cached(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    return timed((True,) * len(costs), costs, lead)


def plan_naive(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    """Every block is loaded, then computed; nothing runs side by side."""
    return Planned((True,) * len(costs), sum(cost.load + cost.cached for cost in costs), 0.0)


def plan_dense(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int], lead: float = 0.0) -> Planned:
    return timed((False,) * len(costs), costs, lead)


Policy = Callable[[Sequence[BlockCost], Kind, Sequence[int], float], Planned]
POLICIES: dict[PlanPolicy, Policy] = {
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


class Option(NamedTuple):
    """A unit with some blocks dense, then cached to its end. From a place where loading is at l and computing at c, it
    leads to l + load and to the later of c + compute and l + wait."""

    load: float
    compute: float
    wait: float
    needs: int  # bits that must not be set: those of its dense blocks
    sets: int  # those of its cached blocks
    num_dense: int


def search(
    options: Sequence[Sequence[Option]], share: float, tail: float, lead: float, most: float
) -> Sequence[Option] | None:
    """The fastest plan that takes less than `most` seconds, if there is one that caches anything."""
    rest = 1 - share
    still = list(accumulate((least(unit, share) for unit in reversed(options)), initial=share * tail))[::-1]
    still_computed = list(accumulate((least(unit, 0.0) for unit in reversed(options)), initial=0.0))[::-1]
    states: list[State] = [(-lead, 0.0, 0, ())]
    for index, unit in enumerate(options, 1):
        end = most - still[index]
        reached = [
            (loaded, computed, bits | option[4], (option, path))
            for at, now, bits, path in states
            for option in unit
            if not bits & option[3]
            and share * (loaded := at + option[0])
            + rest * (computed := first if (first := now + option[1]) > (last := at + option[2]) else last)
            < end
        ]
        states = front(reached, most - still_computed[index])
    if not states:
        return None
    path = min(states, key=itemgetter(1))[3]
    chosen = []
    while path:
        option, path = path
        chosen.append(option)
    return chosen[::-1]


def make_options(costs: Sequence[BlockCost], kind: Kind, units: Sequence[int]) -> Iterator[list[Option]]:
    """The options of each unit. Equal units share bits: of two of them, the earlier has at least as many dense blocks
    in some fastest plan, for where it has fewer, exchanging the two lets every load end as early or earlier, and as
    much is computed. So a block that was cached once is cached whenever it comes again."""
    names: dict[object, int] = {}
    seen: dict[object, list[Option]] = {}
    for end, length in zip(accumulate(units), units, strict=True):
        unit = tuple(costs[end - length : end])
        can_exchange = all(cost.cached <= cost.dense for cost in unit)
        name: object = (unit if kind == "kv" else unit[0]) if can_exchange else end
        if (name, length) not in seen:
            places = range(length) if kind == "kv" else [0] * length
            bits = [1 << names.setdefault((name, place), len(names)) for place in places]
            seen[name, length] = unit_options(unit, bits)
        yield seen[name, length]


def unit_options(unit: Sequence[BlockCost], bits: Sequence[int]) -> list[Option]:
    needs = list(accumulate(bits, or_, initial=0))
    load, after, wait, sets = 0.0, 0.0, -math.inf, 0
    before = sum(cost.dense for cost in unit)
    options = [Option(load, before, wait, needs[-1], sets, len(unit))]
    for place in range(len(unit) - 1, -1, -1):
        cost = unit[place]
        load += cost.load
        after += cost.cached
        before -= cost.dense
        # its own load, then all that computes from it on; whatever later blocks wait for comes later by its load
        wait = cost.load + max(wait, after)
        sets |= bits[place]
        options.append(Option(load, before + after, wait, needs[place], sets, place))
    return options


def front(states: list[State], most: float) -> list[State]:
    """The states that no other is ahead of in both streams, and that can still end in time."""
    states.sort(key=itemgetter(0))
    kept = []
    for state in states:
        if state[1] < most:
            most = state[1]
            kept.append(state)
    return kept


def find_share(options: Sequence[Sequence[Option]], lead: float) -> float:
    """Of all means of the two streams, share * loaded + (1 - share) * computed, that whose least is highest: a step is
    as long as either stream, and so as any mean of the two."""
    low, high = 0.0, 1.0
    counts = Counter(map(id, options))
    distinct = {id(unit): unit for unit in options}
    for _ in range(NUM_BISECTIONS):
        share = (low + high) / 2
        slope = -lead
        for name, unit in distinct.items():
            option = best(unit, share)
            slope += counts[name] * (option.load - option.compute)
        low, high = (share, high) if slope > 0 else (low, share)
    return low


def best(unit: Sequence[Option], share: float) -> Option:
    rest = 1 - share
    return min(unit, key=lambda option: share * option[0] + rest * option[1])


def least(unit: Sequence[Option], share: float) -> float:
    option = best(unit, share)
    return share * option.load + (1 - share) * option.compute


def dense_first(options: Sequence[Sequence[Option]], lead: float) -> tuple[list[Option], float]:
    """The fastest of those plans that are dense up to somewhere and cached from there on, and its seconds."""
    dense = list(accumulate((unit[0].compute for unit in options), initial=0.0))
    found, most = (0, options[0][0]), math.inf
    after, wait = 0.0, -math.inf  # of the units behind, all cached; as in an option
    for index in range(len(options) - 1, -1, -1):
        for option in options[index]:
            computed = max(dense[index] + option.compute, option.wait - lead)
            if (seconds := max(computed + after, option.load - lead + wait)) < most:
                found, most = (index, option), seconds
        cached = options[index][-1]
        after, wait = cached.compute + after, max(cached.wait + after, cached.load + wait)
    index, option = found
    return [*(unit[0] for unit in options[:index]), option, *(unit[-1] for unit in options[index + 1 :])], most


def unwind(path: Sequence[Option], units: Sequence[int]) -> Plan:
    pairs = zip(path, units, strict=True)
    return tuple(block >= option.num_dense for option, length in pairs for block in range(length))

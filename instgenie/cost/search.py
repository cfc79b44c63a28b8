"""Two searches for a plan: the fastest one, by dynamic programming, and the paper's greedy Algorithm 1 to compare with.
Knows the costs of blocks and the lengths of runs; `planner` decides which search is used.

Two streams work side by side: one loads, one computes (see `latency.makespan`). After some runs of blocks, all that
matters for the rest is the time that each stream has reached. So the exact search goes from run to run and keeps only
states that no other state beats in both streams, and that can still end before the best plan known. What it drops
cannot be part of a faster plan, so the result is exact.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter, or_

from instgenie.cost.latency import BlockCost
from instgenie.cost.plan import Plan, run_starts
from instgenie.types import Kind

NUM_BISECTIONS = 12


def greedy_plan(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float) -> Plan:
    """The paper's Algorithm 1: a block is cached if it then ends no later than if it were dense. With `kv` a run that
    has begun to be cached stays cached to its end."""
    starts = run_starts(run_lengths)
    loaded, computed = -lead, 0.0
    plan: list[bool] = []
    for block, cost in enumerate(costs):
        must_stay_cached = kind == "kv" and block not in starts and plan[-1]
        cached_end = max(computed, loaded + cost.load) + cost.cached
        plan.append(must_stay_cached or cached_end <= computed + cost.dense)
        loaded, computed = (loaded + cost.load, cached_end) if plan[-1] else (loaded, computed + cost.dense)
    return tuple(plan)


def fastest_plan(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float) -> Plan:
    """The plan with the shortest makespan of all that are feasible."""
    if kind == "kv" and len(run_lengths) == 1:
        return fastest_prefix(costs, lead)
    if kind == "y":  # any plan is feasible, but among equal blocks in a row the dense ones may as well come first
        run_lengths = [len(list(equal)) for _, equal in groupby(costs)]
    runs = list(make_choices(costs, kind, run_lengths))
    known, limit = fastest_switch(runs, lead)
    last_compute = min(cost.cached for cost in costs)  # at least this follows the last load
    found = search(runs, find_weight(runs, lead), last_compute, lead, limit)
    return make_plan(found or known, run_lengths)


def fastest_prefix(costs: Sequence[BlockCost], lead: float) -> Plan:
    """The fastest plan of a single run with `kv`: a dense prefix, then cached to the end."""
    choices = run_choices(costs, [0] * len(costs))
    best = min(choices, key=lambda choice: max(choice.compute, choice.wait - lead))
    return make_plan([best], [len(costs)])


@dataclass(slots=True)
class RunChoice:
    """A run whose first `num_dense` blocks are dense and whose others are cached. If it starts when loading is at time
    l and computing at time c, it ends with loading at l + load and computing at max(c + compute, l + wait)."""

    load: float
    compute: float
    wait: float
    dense_bits: int  # of its dense blocks; see `make_choices`
    cached_bits: int  # of its cached blocks
    num_dense: int


@dataclass(slots=True)
class SearchState:
    """The two streams after some runs."""

    loaded: float  # time at which the last load ends
    computed: float  # time at which the last compute ends
    cached_bits: int  # of all blocks cached so far
    choice: RunChoice | None = None  # of the last run
    parent: "SearchState | None" = None  # before that run


def search(
    runs: Sequence[Sequence[RunChoice]], weight: float, last_compute: float, lead: float, limit: float
) -> list[RunChoice] | None:
    """The choices of the fastest plan that takes less than `limit` seconds; None if there is no such plan.

    A plan takes no less than any weighted mean of its two streams, nor than its computing alone: both bound from below
    what the runs to come will add.
    """
    ahead = list(accumulate((least_mean(run, weight) for run in reversed(runs)), initial=weight * last_compute))[::-1]
    ahead_computing = list(accumulate((least_mean(run, 0.0) for run in reversed(runs)), initial=0.0))[::-1]
    states = [SearchState(-lead, 0.0, 0)]
    for index, run in enumerate(runs, 1):
        states = advance(states, run, weight, limit - ahead[index], limit - ahead_computing[index])
    if not states:
        return None
    state: SearchState | None = states[-1]
    chosen = []
    while state and state.choice:
        chosen.append(state.choice)
        state = state.parent
    return chosen[::-1]


def advance(
    states: Sequence[SearchState], run: Sequence[RunChoice], weight: float, mean_limit: float, compute_limit: float
) -> list[SearchState]:
    """The states after one more run that no other beats in both streams, and whose weighted mean and computing are
    below their limits. Loading rises along the list and computing falls: the last state is the fastest."""
    rest = 1 - weight
    reached = []
    for state in states:
        before_load, before_compute, cached_bits = state.loaded, state.computed, state.cached_bits
        for choice in run:
            if cached_bits & choice.dense_bits:
                continue
            loaded = before_load + choice.load
            computed, waited = before_compute + choice.compute, before_load + choice.wait
            if waited > computed:  # quicker than max() in this innermost loop
                computed = waited
            if weight * loaded + rest * computed < mean_limit:
                reached.append((loaded, computed, choice, state))
    reached.sort(key=itemgetter(0))  # by loaded
    kept = []
    for loaded, computed, choice, state in reached:
        if computed < compute_limit:
            compute_limit = computed
            kept.append(SearchState(loaded, computed, state.cached_bits | choice.cached_bits, choice, state))
    return kept


def make_choices(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int]) -> Iterator[list[RunChoice]]:
    """The choices of each run.

    Equal runs share the bits of their blocks. In some fastest plan, the earlier of two equal runs has at least as many
    dense blocks: if it had fewer, exchanging the two would let every load end as early or earlier, with the same total
    compute. So a block that was cached once is cached in every equal run that follows: a choice whose dense blocks have
    bits among those cached before is skipped.
    """
    positions: dict[object, int] = {}
    seen: dict[object, list[RunChoice]] = {}
    for end, length in zip(accumulate(run_lengths), run_lengths, strict=True):
        run = tuple(costs[end - length : end])
        can_exchange = all(cost.cached <= cost.dense for cost in run)
        name: object = (run if kind == "kv" else run[0]) if can_exchange else end
        if (name, length) not in seen:
            places = range(length) if kind == "kv" else [0] * length
            bits = [1 << positions.setdefault((name, place), len(positions)) for place in places]
            seen[name, length] = run_choices(run, bits)
        yield seen[name, length]


def run_choices(run: Sequence[BlockCost], bits: Sequence[int]) -> list[RunChoice]:
    """All dense first, then one block more cached with each choice, from the end."""
    dense_bits = list(accumulate(bits, or_, initial=0))
    load, wait, cached_bits = 0.0, -math.inf, 0
    dense, cached = sum(cost.dense for cost in run), 0.0  # compute of the dense and of the cached blocks
    choices = [RunChoice(load, dense, wait, dense_bits[-1], cached_bits, len(run))]
    for place in range(len(run) - 1, -1, -1):
        cost = run[place]
        load += cost.load
        cached += cost.cached
        dense -= cost.dense
        # this block's load is followed by all that computes from here on, and delays the loads of the blocks behind
        wait = cost.load + max(wait, cached)
        cached_bits |= bits[place]
        choices.append(RunChoice(load, dense + cached, wait, dense_bits[place], cached_bits, place))
    return choices


def find_weight(runs: Sequence[Sequence[RunChoice]], lead: float) -> float:
    """The weight of loading for which the least weighted mean of the two streams, weight * loaded +
    (1 - weight) * computed, is highest, and so the sharpest lower bound of a step's seconds."""
    low, high = 0.0, 1.0
    counts = Counter(map(id, runs))
    distinct = {id(run): run for run in runs}
    for _ in range(NUM_BISECTIONS):
        weight = (low + high) / 2
        slope = -lead
        for name, run in distinct.items():
            choice = least_choice(run, weight)
            slope += counts[name] * (choice.load - choice.compute)
        low, high = (weight, high) if slope > 0 else (low, weight)
    return low


def least_choice(run: Sequence[RunChoice], weight: float) -> RunChoice:
    rest = 1 - weight
    return min(run, key=lambda choice: weight * choice.load + rest * choice.compute)


def least_mean(run: Sequence[RunChoice], weight: float) -> float:
    choice = least_choice(run, weight)
    return weight * choice.load + (1 - weight) * choice.compute


def fastest_switch(runs: Sequence[Sequence[RunChoice]], lead: float) -> tuple[list[RunChoice], float]:
    """The fastest plan that is dense up to some block and cached from there on, and its seconds."""
    dense = list(accumulate((run[0].compute for run in runs), initial=0.0))
    best_index, best_choice, best_seconds = 0, runs[0][0], math.inf
    compute, wait = 0.0, -math.inf  # of the runs behind, all cached; as in a choice
    for index in range(len(runs) - 1, -1, -1):
        for choice in runs[index]:
            computed = max(dense[index] + choice.compute, choice.wait - lead)
            seconds = max(computed + compute, choice.load - lead + wait)
            if seconds < best_seconds:
                best_index, best_choice, best_seconds = index, choice, seconds
        cached = runs[index][-1]
        compute, wait = cached.compute + compute, max(cached.wait + compute, cached.load + wait)
    before, behind = runs[:best_index], runs[best_index + 1 :]
    return [*(run[0] for run in before), best_choice, *(run[-1] for run in behind)], best_seconds


def make_plan(chosen: Sequence[RunChoice], run_lengths: Sequence[int]) -> Plan:
    pairs = zip(chosen, run_lengths, strict=True)
    return tuple(block >= choice.num_dense for choice, length in pairs for block in range(length))

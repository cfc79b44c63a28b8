"""Plans without a model: which are feasible, and which are fastest."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instgenie.cost.latency import BlockCost, Latency, makespan
from instgenie.cost.network import BlockShape, Demand, NetworkShape
from instgenie.cost.plan import DENSE, check_plan, dense_after_cached, is_cached
from instgenie.cost.planner import POLICIES, plan_batch, plan_cached, plan_dense, plan_exact, plan_greedy, plan_naive
from instgenie.errors import PlanError
from instgenie.types import Kind


def test_y_runs_any_plan() -> None:
    for plan in itertools.product((False, True), repeat=5):
        check_plan(plan, "y", (5,))


def test_kv_runs_a_dense_prefix_then_cached_to_the_end() -> None:
    feasible = {(False,) * dense + (True,) * (5 - dense) for dense in range(6)}
    for plan in itertools.product((False, True), repeat=5):
        if plan in feasible:
            check_plan(plan, "kv", (5,))
        else:
            with pytest.raises(PlanError, match="cannot come back"):
                check_plan(plan, "kv", (5,))


def test_a_bad_plan_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="block 3 dense after block 1"):
        check_plan((False, True, True, False, True), "kv", (5,))
    with pytest.raises(PlanError, match="has 4 blocks, but the model has 5"):
        check_plan((True,) * 4, "y", (5,))


def test_past_the_last_block_a_plan_is_cached_if_any_block_was() -> None:
    assert [is_cached((True, False), block) for block in range(3)] == [True, False, True]
    assert not any(is_cached(plan, block) for plan in (DENSE, (False, False)) for block in range(3))


def cost(cached: float = 0.2, dense: float = 1.0, load: float = 0.5) -> BlockCost:
    return BlockCost(cached, dense, load)


# blocks of few shapes, as in real networks, or all different; times with ties or without
times = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 2))
block_costs = st.builds(BlockCost, times, times, times)
leads = st.sampled_from([0.0, 0.3, 1.5])
kinds = st.sampled_from(["kv", "y"])


@st.composite
def networks(draw: st.DrawFn, max_runs: int, max_blocks: int) -> tuple[list[BlockCost], list[int]]:
    run_lengths = draw(st.lists(st.integers(1, max_blocks), min_size=1, max_size=max_runs))
    shapes = draw(st.lists(block_costs, min_size=1, max_size=4))
    if draw(st.booleans()):
        run = draw(st.lists(st.sampled_from(shapes), min_size=max_blocks, max_size=max_blocks))
        return [shape for length in run_lengths for shape in run[:length]], run_lengths
    return [draw(st.one_of(st.sampled_from(shapes), block_costs)) for _ in range(sum(run_lengths))], run_lengths


def brute_force(costs: Sequence[BlockCost], kind: Kind, run_lengths: Sequence[int], lead: float) -> float:
    plans = itertools.product((False, True), repeat=len(costs))
    return min(
        makespan(plan, costs, lead) for plan in plans if kind == "y" or not dense_after_cached(plan, run_lengths)
    )


@settings(max_examples=400, deadline=None)
@given(networks(max_runs=4, max_blocks=2), kinds, leads)
def test_exact_finds_the_plan_of_brute_force(
    network: tuple[list[BlockCost], list[int]], kind: Kind, lead: float
) -> None:
    costs, run_lengths = network
    planned = plan_exact(costs, kind, run_lengths, lead)
    check_plan(planned.plan, kind, run_lengths)
    assert planned.seconds == makespan(planned.plan, costs, lead)
    assert planned.seconds == pytest.approx(brute_force(costs, kind, run_lengths, lead), abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(networks(max_runs=6, max_blocks=9), kinds, leads)
def test_exact_is_never_worse_than_another_policy(
    network: tuple[list[BlockCost], list[int]], kind: Kind, lead: float
) -> None:
    costs, run_lengths = network
    planned = {name: policy(costs, kind, run_lengths, lead) for name, policy in POLICIES.items()}
    for name, other in planned.items():
        check_plan(other.plan, kind, run_lengths)
        assert planned["exact"].seconds <= other.seconds + 1e-9, name


def test_greedy_is_the_printed_algorithm() -> None:
    """It caches whenever that block ends no later, so it is load-bound from the first block on, where waiting pays."""
    costs = [cost(0.05, 1, 0.9)] * 4
    assert plan_greedy(costs, "y", [4]).seconds == pytest.approx(3.65)
    assert plan_greedy(costs, "y", [4]).plan == (True,) * 4
    assert plan_exact(costs, "y", [4]).seconds == pytest.approx(2.10)
    assert plan_exact(costs, "y", [4]).plan == plan_exact(costs, "kv", [4]).plan == (False, False, True, True)


def test_greedy_computes_blocks_that_would_wait_too_long() -> None:
    costs = [cost(0.1, 1, 2.5)] * 4
    # one load takes as long as two and a half blocks: only the fourth block ends no later cached
    assert plan_greedy(costs, "y", [4]).plan == (False, False, True, False)
    assert plan_greedy(costs, "kv", [4]).plan == (False, False, True, True)


def test_naive_hides_nothing_and_cached_hides_loads() -> None:
    costs = [cost(0.2, 1, 0.5)] * 3
    assert plan_naive(costs, "kv", [3]).seconds == pytest.approx(3 * 0.7)
    assert plan_cached(costs, "kv", [3]).seconds == pytest.approx(3 * 0.5 + 0.2)
    assert plan_dense(costs, "kv", [3]).seconds == pytest.approx(3)


def test_blocks_in_gpu_memory_are_cached() -> None:
    costs = [cost(load=0.0) if block in (1, 4) else cost(load=50.0) for block in range(6)]
    assert plan_exact(costs, "y", [6]).plan == (False, True, False, False, True, False)


def test_a_lead_hides_the_first_loads() -> None:
    costs = [cost(0.2, 1, 0.9)] * 3
    without = plan_exact(costs, "kv", [3])
    ahead = plan_exact(costs, "kv", [3], lead=3.0)
    assert ahead.seconds == pytest.approx(0.6)
    assert without.seconds > 1
    assert ahead.lead == pytest.approx(3.0 + 0.6 - 2.7)  # the old lead plus the seconds minus the loads
    assert without.lead == pytest.approx(without.seconds - 0.9 * sum(without.plan))


NETWORK = NetworkShape(
    blocks=(BlockShape(per_token=100, per_text=100, per_rest=20, per_pair=4, per_branch=0, width=10, joint=True),) * 6,
    run_lengths=(6,),
    per_token=0,
    per_branch=0,
)
LATENCY = Latency("a device", "a model", block=0.0, flop=1e-6, flop_outside=0.0, load=0.0, byte=1e-6)


def demand(num_masked: int, **fields: Any) -> Demand:
    return Demand(num_tokens=100, num_masked={1: num_masked}, num_text=4, **fields)


def test_a_batch_has_one_plan() -> None:
    jobs = [demand(10, kind="kv"), demand(40, kind="kv"), demand(50)]
    planned = plan_batch(NETWORK, jobs, LATENCY)
    check_plan(planned.plan, "kv", NETWORK.run_lengths)
    assert planned.seconds == pytest.approx(LATENCY.predict_step(NETWORK, jobs, planned.plan))
    assert planned.seconds <= plan_batch(NETWORK, jobs, LATENCY, policy="greedy").seconds


def test_a_batch_of_kv_and_y_does_not_turn_back() -> None:
    here = frozenset({1, 3})
    slow = replace(LATENCY, byte=1.0)
    alone = plan_batch(NETWORK, [demand(10, kind="y", in_gpu=here)], slow)
    mixed = plan_batch(NETWORK, [demand(10, kind="y", in_gpu=here), demand(10, kind="kv", in_gpu=here)], slow)
    assert alone.plan == (False, True, False, True, False, False)
    check_plan(mixed.plan, "kv", NETWORK.run_lengths)


def test_a_batch_without_activations_is_dense() -> None:
    assert plan_batch(NETWORK, [demand(10), demand(20)], LATENCY).plan == (False,) * 6


def test_everything_in_gpu_memory_is_cached() -> None:
    jobs = [demand(10, kind="kv", in_gpu=frozenset(range(6)))]
    assert plan_batch(NETWORK, jobs, replace(LATENCY, byte=1.0)).plan == (True,) * 6


def test_the_planner_needs_no_torch() -> None:
    check = "import sys, instgenie.cost.planner, instgenie.cost.latency; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

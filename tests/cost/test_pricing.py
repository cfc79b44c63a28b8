"""The table of step costs against the planner, and the router's use of it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instgenie.cost.latency import DEFAULTS, Latency
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.cost.planner import plan_batch
from instgenie.cost.pricing import RATIOS, JobShape, make_costs
from instgenie.cost.table import StepCosts
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.router import Router, Work, WorkerLoad, predicted_finish
from instgenie.types import PlanPolicy, TierName

NUM_TOKENS = 1024
BLOCK = BlockShape(per_token=2 * 12 * 512**2, per_text=2 * 12 * 512**2, per_rest=0, per_pair=4 * 512, per_branch=0,
                   width=512, joint=True)  # fmt: skip
SHAPE = JobShape(NetworkShape((BLOCK,) * 20, (20,), per_token=2 * 64 * 512, per_branch=0), num_text=64)
FAST = DEFAULTS["cuda"]  # loads are hidden
SLOW = Latency(
    "slow", "any", block=2e-4, flop=5e-13, flop_outside=5e-13, load=1e-5, byte=1 / 2e9
)  # loads are not hidden
LATENCIES = {"fast": FAST, "slow": SLOW}
WORK = Work(num_steps=10, num_tokens=NUM_TOKENS, num_masked_tokens=100, template="cat")
TIERS: tuple[TierName | None, ...] = ("gpu", "host", "disk", "remote", None)


def costs_of(latency: Latency = SLOW, policy: PlanPolicy = "cached") -> StepCosts:
    return make_costs(SHAPE, latency, policy, NUM_TOKENS)


def planner_seconds(
    latency: Latency, policy: PlanPolicy, ratios: list[float], num_dense: int, *, in_gpu: bool
) -> float:
    """Seconds of a step, by the planner."""
    demands = [SHAPE.demand(NUM_TOKENS, round(ratio * NUM_TOKENS), in_gpu) for ratio in ratios]
    demands += [SHAPE.dense_demand(NUM_TOKENS)] * num_dense
    outside = latency.outside(SHAPE.network, demands)
    return plan_batch(SHAPE.network, demands, latency, policy=policy).seconds + outside


def table_seconds(costs: StepCosts, ratios: list[float], num_dense: int, *, in_gpu: bool) -> float:
    """Seconds of a step, by the table."""
    tier: TierName = "gpu" if in_gpu else "host"
    prices = [costs.price(NUM_TOKENS, round(ratio * NUM_TOKENS), tier) for ratio in ratios]
    return costs.step_seconds(prices + [costs.price(NUM_TOKENS, NUM_TOKENS, None)] * num_dense)


@pytest.mark.parametrize("policy", ["cached", "exact", "greedy", "naive", "dense"])
@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("in_gpu", [True, False])
def test_one_job_costs_what_the_planner_says(name: str, policy: PlanPolicy, in_gpu: bool) -> None:
    latency = LATENCIES[name]
    costs = costs_of(latency, policy)
    for ratio in RATIOS:
        exact = planner_seconds(latency, policy, [ratio], 0, in_gpu=in_gpu)
        assert table_seconds(costs, [ratio], 0, in_gpu=in_gpu) == pytest.approx(exact, rel=0.01)
    dense = planner_seconds(latency, policy, [], 1, in_gpu=in_gpu)
    assert table_seconds(costs, [], 1, in_gpu=in_gpu) == pytest.approx(dense, rel=1e-6)


@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("in_gpu", [True, False])
@pytest.mark.parametrize("ratios", [[0.1] * 8, [0.05, 0.1, 0.2, 0.35], [0.05, 0.6], [0.02, 0.15, 0.5]])
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize(("policy", "error"), [("cached", 0.05), ("exact", 0.12)])
def test_a_batch_costs_what_the_planner_says(
    name: str, in_gpu: bool, ratios: list[float], num_dense: int, policy: PlanPolicy, error: float
) -> None:
    """If loading is slow, the plan of a batch is a little better than the plans of its jobs."""
    latency = LATENCIES[name]
    exact = planner_seconds(latency, policy, ratios, num_dense, in_gpu=in_gpu)
    assert table_seconds(costs_of(latency, policy), ratios, num_dense, in_gpu=in_gpu) == pytest.approx(exact, rel=error)


def test_a_table_goes_over_the_wire() -> None:
    costs = costs_of()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(costs), type=StepCosts) == costs


def load_with(tier: TierName | None, worker: int = 0, num_edits: int = 0, max_batch_size: int = 4) -> WorkerLoad:
    load = WorkerLoad(worker, max_batch_size, costs=costs_of(), templates={"cat": tier} if tier else {})
    for edit in range(num_edits):
        load.add(str(edit), 10, NUM_TOKENS, load.costs.dense)
    return load


def test_a_higher_tier_finishes_earlier() -> None:
    finishes = [predicted_finish(WORK, load_with(tier)) for tier in TIERS]
    assert finishes[:3] == sorted(set(finishes[:3]))
    assert finishes[2] < finishes[3]
    assert finishes[2] < finishes[4]
    for better, worse in (("gpu", "host"), ("host", "disk"), ("disk", None), ("disk", "remote")):
        loads = [load_with(worse, 0), load_with(better, 1), load_with(worse, 2)]  # type: ignore[arg-type]
        assert {Router().choose(WORK, loads) for _ in range(3)} == {1}, (better, worse)


def test_a_fetch_is_charged_once() -> None:
    load = load_with("disk")
    first = predicted_finish(WORK, load)
    load.expect("cat")
    second = predicted_finish(WORK, load)
    num_bytes = 10 * 20 * 2 * 512 * NUM_TOKENS * 2  # steps, blocks, K and V, width, tokens, bytes per value
    assert first - second == pytest.approx(0.01 + num_bytes / 1e9)
    assert second == predicted_finish(WORK, load_with("host"))


def test_a_busy_holder_competes_with_an_idle_worker() -> None:
    """The holder wins as long as its waiting work costs less than it saves."""
    saved = predicted_finish(WORK, load_with(None)) - predicted_finish(WORK, load_with("gpu"))
    for num_steps, winner in ((1, 1), (1000, 0)):
        holder = load_with("gpu", 1)
        holder.add("other", num_steps, NUM_TOKENS, holder.costs.dense)
        delay = predicted_finish(WORK, holder) - predicted_finish(WORK, load_with("gpu"))
        assert (delay < saved) == (winner == 1)
        assert Router().choose(WORK, [load_with(None, 0), holder]) == winner


def test_measured_steps_correct_the_table() -> None:
    """A worker is four times as slow as its table says."""
    honest, slow = load_with("gpu", 0), load_with("gpu", 1)
    for ratio in (0.05, 0.2, 0.6) * 100:
        step = table_seconds(honest.costs, [ratio], 0, in_gpu=True)
        honest.pace.measure(step, step)
        slow.pace.measure(step, 4 * step)
    assert predicted_finish(WORK, slow) == pytest.approx(4 * predicted_finish(WORK, honest), rel=0.02)


def edits() -> st.SearchStrategy[list[tuple[int, float, TierName | None]]]:
    return st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1), st.sampled_from(TIERS)), max_size=12)


COSTS = {name: costs_of(latency, "exact") for name, latency in LATENCIES.items()}


@given(
    name=st.sampled_from(sorted(LATENCIES)),
    before=edits(),
    more=st.tuples(st.integers(1, 50), st.floats(0, 1), st.sampled_from(TIERS)),
    steps=st.tuples(st.integers(1, 50), st.integers(0, 50)),
    ratio=st.floats(0, 1),
    tier=st.sampled_from(TIERS),
    measured=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=20),
)
def test_more_work_never_ends_earlier(
    name: str,
    before: list[tuple[int, float, TierName | None]],
    more: tuple[int, float, TierName | None],
    steps: tuple[int, int],
    ratio: float,
    tier: TierName | None,
    measured: list[tuple[float, float]],
) -> None:
    """Another edit, more steps, more pictures, a step that is not taken."""
    pace = Pace()
    for predicted, seconds in measured:
        pace.measure(predicted, seconds)
    load = WorkerLoad(0, 4, pace, COSTS[name], {"cat": tier} if tier else {})

    def add(edit: str, num_steps: int, share: float, where: TierName | None) -> None:
        load.add(edit, num_steps, NUM_TOKENS, load.costs.price(NUM_TOKENS, share * NUM_TOKENS, where))

    for index, edit in enumerate(before):
        add(str(index), *edit)
    work = Work(steps[0], NUM_TOKENS, round(ratio * NUM_TOKENS), "cat")
    least = predicted_finish(work, load) * (1 - 1e-9)
    longer = Work(sum(steps), work.num_tokens, work.num_masked_tokens, "cat")
    both = Work(steps[0], 2 * work.num_tokens, 2 * work.num_masked_tokens, "cat", num_edits=2)
    assert predicted_finish(longer, load) >= least
    assert predicted_finish(both, load) >= least
    add("more", *more)
    after = predicted_finish(work, load)
    assert after >= least
    load.step("more")
    assert predicted_finish(work, load) <= after * (1 + 1e-9)


@given(st.sampled_from(sorted(LATENCIES)), st.floats(0, 1), st.floats(0, 1))
def test_in_the_gpu_more_masked_tokens_never_cost_less(name: str, one: float, other: float) -> None:
    low, high = (COSTS[name].price(1, share, "gpu") for share in sorted((one, other)))
    assert low.compute <= high.compute * (1 + 1e-9)
    assert high.compute <= COSTS[name].dense.compute * (1 + 1e-9)

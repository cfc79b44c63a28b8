"""Figure 4: the cost of queueing without continuous batching, and of loading without a plan."""

from dataclasses import replace

from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row, times
from instgenie.bench.reproduce.traffic import SHARES, mean_shares, served
from instgenie.cost.network import Demand
from instgenie.cost.planner import POLICIES, plan_batch
from instgenie.scheduling.names import Batching

NAME = "fig4"
BATCHINGS: tuple[Batching, ...] = ("static", "naive", "continuous")
ABOUT = {
    "naive": "load, then compute",
    "cached": "cache everything, overlap loads",
    "greedy": "Algorithm 1 of the paper",
    "exact": "exact plan",
    "dense": "cache nothing",
}
SLOWER = 4.0  # loads come from storage that is this many times slower than memory


def run(lab: Lab) -> Section:
    waiting = [row(NAME, name, *mean_shares(served(lab, name))) for name in BATCHINGS]
    steps = plan_steps(lab)
    ratio = lab.scale.mask_ratios[0]
    gain = steps["naive", ratio] / steps["exact", ratio]
    return Section(
        name=NAME,
        title="Queueing and loading",
        paper="Under static batching edits wait for whole batches; loading activations without overlap takes back much "
        "of what they save.",
        here="Waiting: real clusters that get the same edits. Loading: a step of one job whose activations all lie in "
        f"storage {SLOWER:g} times slower than this machine's memory, as the latency model of this run predicts it for "
        "every planning policy.",
        tables=[
            Table("Mean seconds of an edit by stage",
                  ("batching", *SHARES), waiting),
            Table("A step that loads, predicted ms", ("plan", *(f"mask {r:g}" for r in lab.scale.mask_ratios)),
                  [step_row(name, steps, lab) for name in ABOUT]),
        ],
        charts=[chart(steps, lab)],
        findings=[f"At mask ratio {ratio:g} the exact plan is {times(gain)} as fast as loading and computing in turn."],
    )  # fmt: skip


def plan_steps(lab: Lab) -> dict[tuple[str, float], float]:
    """Predict the seconds of a step by policy and mask ratio."""
    latency = lab.calibration.latency
    slow = replace(latency, byte=SLOWER * latency.byte)
    found: dict[tuple[str, float], float] = {}
    for ratio in lab.scale.mask_ratios:
        demand = demand_of(lab, ratio)
        for policy in POLICIES:
            planned = plan_batch(lab.network, [demand], slow, policy=policy)
            found[policy, ratio] = planned.seconds + slow.outside(lab.network, [demand], planned.plan)
    return found


def demand_of(lab: Lab, ratio: float) -> Demand:
    return lab.shape.demand(lab.num_tokens, max(round(ratio * lab.num_tokens), 1), in_gpu=False)


def step_row(policy: str, steps: dict[tuple[str, float], float], lab: Lab) -> Row:
    return row(
        NAME, ABOUT[policy], *(ms(steps[policy, ratio]) for ratio in lab.scale.mask_ratios), key=("plan", policy)
    )


def chart(steps: dict[tuple[str, float], float], lab: Lab) -> Chart:
    ratios = lab.scale.mask_ratios
    series = [Series(name, [(ratio, 1000 * steps[name, ratio]) for ratio in ratios]) for name in ABOUT]
    return Chart(
        "A step that loads",
        at_values("mask ratio", ratios),
        linear("ms, predicted", [1000 * seconds for seconds in steps.values()]),
        series,
    )

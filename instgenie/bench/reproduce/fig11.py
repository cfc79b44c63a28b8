"""Figure 11: linear models of compute and of loading, fitted to measurements of this device."""

from collections.abc import Sequence

from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import decades
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section, Table, ms, row
from instgenie.cost.latency import Latency, LoadSample
from instgenie.engine.calibrate import Case, predict

NAME = "fig11"


def run(lab: Lab) -> Section:
    found = lab.calibration
    predicted = [predict(found.latency, lab.network, step) for step in found.steps]
    measured = [step.seconds for step in found.steps]
    return Section(
        name=NAME,
        title="Latency models",
        paper="Compute time is linear in FLOPs and loading time in bytes, with R² close to 1, so the planner can rely "
        "on linear models.",
        here="Steps of several batches (cached at five mask ratios, half dense, and dense) and transfers of several "
        "sizes, as instgenie calibrate measures them; the fastest of a few rounds counts.",
        tables=[fit_table(found.latency), step_table(found.cases, measured, predicted)],
        charts=[step_chart(found.cases, measured, predicted), load_chart(found.latency, found.loads)],
        findings=[f"R² is {found.latency.r2_compute:.3f} for compute and {found.latency.r2_load:.3f} for loading."],
    )


def fit_table(latency: Latency) -> Table:
    compute = f"{latency.block * 1e3:.3g} ms per block + {latency.flop * 1e12:.3g} ms per GFLOP"
    load = f"{latency.load * 1e6:.3g} µs + {latency.byte * 1e12:.3g} µs per MB"
    rows = [
        row(NAME, "compute", compute, f"{latency.r2_compute:.4f}"),
        row(NAME, "load", load, f"{latency.r2_load:.4f}"),
    ]
    return Table("Fits", ("what", "line", "R²"), rows)


def step_table(cases: Sequence[Case], measured: Sequence[float], predicted: Sequence[float]) -> Table:
    rows = []
    for case, one, other in zip(cases, measured, predicted, strict=True):
        key = case.name, len(case.jobs), f"{case.mask_ratio:.2f}"
        rows.append(row(NAME, *key, ms(one), ms(other), f"{other / one - 1:+.0%}", key=key))
    return Table("Steps", ("plan", "jobs", "masked", "measured ms", "predicted ms", "error"), rows)


def step_chart(cases: Sequence[Case], measured: Sequence[float], predicted: Sequence[float]) -> Chart:
    points: dict[str, list[tuple[float, float]]] = {}
    for case, one, other in zip(cases, measured, predicted, strict=True):
        points.setdefault(case.name, []).append((1000 * one, 1000 * other))
    every = [1000 * value for value in (*measured, *predicted)]
    x, y = decades("measured, ms per step", every), decades("predicted, ms per step", every)
    agree = Series("equal", [(x.low, x.low), (x.high, x.high)])
    return Chart("Steps", x, y, [*(Series(name, own, line=False) for name, own in points.items()), agree])


def load_chart(latency: Latency, loads: Sequence[LoadSample]) -> Chart:
    sizes = [sample.num_bytes / 1e6 for sample in loads]
    lines = [1e3 * (latency.load + latency.byte * sample.num_bytes) for sample in loads]
    times = [1e3 * sample.seconds for sample in loads]
    x, y = decades("MB", sizes), decades("ms", [*lines, *times])
    series = [
        Series("measured", list(zip(sizes, times, strict=True)), line=False),
        Series("line", list(zip(sizes, lines, strict=True))),
    ]
    return Chart("Transfers", x, y, series)

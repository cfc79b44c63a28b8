"""Latencies of clusters: tables of real ones, and tables and charts of simulated ones as the arrival rate grows."""

from collections.abc import Mapping, Sequence

from instgenie.bench.latencies import Latencies
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, decades
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Table, row
from instgenie.bench.reproduce.serving import Run
from instgenie.bench.reproduce.traffic import SHARES, drawn_jobs, mean_shares, recipe, run_latencies
from instgenie.bench.workload import draw_workload
from instgenie.simulate.cluster import ClusterShape, simulate
from instgenie.simulate.service import Service

NUM_EDITS = 300

SimulatedSystem = tuple[ClusterShape, Service]
Sweep = dict[tuple[str, float], Latencies]  # by name and rate


def sweep(lab: Lab, systems: Mapping[str, SimulatedSystem], rates: Sequence[float], seed: int) -> Sweep:
    """Simulate every system at every rate, all of them with the same edits."""
    found: Sweep = {}
    for rate in rates:
        for name, (shape, service) in systems.items():
            lab.tell(f"simulating {name} at {rate:.2f} edits per second")
            jobs = drawn_jobs(lab, draw_workload(recipe(lab, NUM_EDITS, rate, seed)))
            simulate(shape, service, jobs)
            found[name, rate] = Latencies.of([job.latency for job in jobs])
    return found


def real_table(part: str, title: str, heading: str, runs: Mapping[str, Run], has_shares: bool = False) -> Table:
    """Make a table of real clusters; with shares, also of the mean seconds that each stage of an edit takes."""
    rows = []
    for name, run in runs.items():
        latencies = run_latencies(run)
        figures = [f"{value:.2f}" for value in (latencies.mean, latencies.p50, latencies.p95)]
        stages = mean_shares(run) if has_shares else []
        rows.append(row(part, name, len(run.served), *figures, *stages, key=("real", name)))
    columns = (heading, "edits", "mean s", "median s", "P95 s", *(SHARES if has_shares else ()))
    return Table(title, columns, rows)


def sweep_table(part: str, title: str, heading: str, found: Sweep) -> Table:
    rates = list(dict.fromkeys(rate for _, rate in found))
    names = dict.fromkeys(name for name, _ in found)
    rows = [row(part, name, *(f"{found[name, rate].p95:.2f}" for rate in rates), key=(heading, name)) for name in names]
    return Table(title, (heading, *(f"{rate:.2f}/s" for rate in rates)), rows)


def sweep_chart(title: str, found: Sweep) -> Chart:
    names = dict.fromkeys(name for name, _ in found)
    series = [Series(name, [(rate, one.p95) for (own, rate), one in found.items() if own == name]) for name in names]
    rates = [round(rate, 2) for _, rate in found]
    seconds = [one.p95 for one in found.values()]
    return Chart(title, at_values("edits per second", rates), decades("P95, seconds", seconds), series)

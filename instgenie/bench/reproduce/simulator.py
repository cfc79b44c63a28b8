"""The simulator compared with real clusters of one and two workers, and simulated clusters of up to 20,000."""

import time
from dataclasses import dataclass
from typing import get_args

from instgenie.bench.latencies import Latencies
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, decades
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, row
from instgenie.bench.reproduce.traffic import MASKS, capacity, drawn_jobs, jobs_of, run_latencies, served, service_of
from instgenie.bench.workload import WorkloadRecipe, draw_workload
from instgenie.scheduling.names import RoutingPolicy
from instgenie.simulate.cluster import ClusterShape, simulate
from instgenie.simulate.service import PlannedService

NAME = "simulator"
POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
WARM_UP = 0.3  # share of the edits that fill the cluster and are not counted


@dataclass(frozen=True)
class SimulatedPoint:
    num_workers: int
    policy: RoutingPolicy
    load: float  # share of the workers' capacity
    rate: float  # edits per second and worker
    latencies: Latencies
    seconds: float  # of computing the simulation
    num_edits: int


def run(lab: Lab) -> Section:
    checks = [check(lab, num_workers) for num_workers in lab.scale.checked]
    points = sweep(lab)
    largest = max(point.num_workers for point in points)
    slowest = max((point for point in points if point.num_workers == largest), key=lambda point: point.seconds)
    worst = max(abs(error) for _, errors in checks for error in errors)
    return Section(
        name=NAME,
        title="Cluster simulator",
        paper="The paper's scheduler is meant for clusters; the paper has no simulator.",
        here="Discrete events around the real router, planner and admission. Predictions use the step times of other "
        "edits that arrived at the same times. The large clusters have workers like the one measured here, at shares "
        "of their capacity; the first third of the edits fills the cluster and is not counted.",
        tables=[
            Table("Predicted against measured", ("workers", "figure", "predicted s", "measured s", "error"),
                  [line for lines, _ in checks for line in lines]),
            Table(
                "P95 of simulated clusters",
                ("workers", "load", "edits/s per worker", *POLICIES, "edits", "seconds to simulate"),
                sweep_rows(points),
            ),
        ],
        charts=[chart(points, num_workers) for num_workers in lab.scale.workers],
        findings=[
            f"The mean and P95 latencies of real clusters are predicted to within {worst:.0%}.",
            f"{slowest.num_edits:,} edits on {largest:,} workers are simulated in {slowest.seconds:.0f} s.",
        ],
    )  # fmt: skip


def check(lab: Lab, num_workers: int) -> tuple[list[Row], list[float]]:
    real = served(lab, num_workers=num_workers)
    jobs = jobs_of(lab, real.served)
    simulate(ClusterShape(num_workers, real.config.max_batch_size), service_of(lab, real), jobs)
    predicted = Latencies.of([job.latency for job in jobs])
    measured = run_latencies(real)
    pairs = {"mean": (predicted.mean, measured.mean), "P95": (predicted.p95, measured.p95)}
    errors = {name: one / other - 1 for name, (one, other) in pairs.items()}
    rows = [
        row(NAME, str(num_workers), name, f"{one:.3f}", f"{other:.3f}", f"{errors[name]:+.0%}", key=(num_workers, name))
        for name, (one, other) in pairs.items()
    ]
    return rows, list(errors.values())


def sweep(lab: Lab) -> list[SimulatedPoint]:
    service = service_of(lab, served(lab))
    most = capacity(lab, service)
    return [
        simulate_one(lab, service, most, num_workers, policy, load)
        for num_workers in lab.scale.workers
        for load in lab.scale.loads
        for policy in POLICIES
    ]


def simulate_one(
    lab: Lab, service: PlannedService, most: float, num_workers: int, policy: RoutingPolicy, load: float
) -> SimulatedPoint:
    lab.tell(f"simulating {num_workers:,} workers, {policy}, load {load:g}")
    num_edits = max(lab.scale.min_edits, lab.scale.edits_per_worker * num_workers)
    rate = load * most * num_workers
    jobs = drawn_jobs(lab, draw_workload(WorkloadRecipe(num_edits, rate, mask_ratios=MASKS)))
    start = time.perf_counter()
    simulate(ClusterShape(num_workers, policy=policy), service, jobs)
    seconds = time.perf_counter() - start
    latencies = Latencies.of([job.latency for job in jobs[int(WARM_UP * num_edits) :]])
    return SimulatedPoint(num_workers, policy, load, rate / num_workers, latencies, seconds, num_edits)


def sweep_rows(points: list[SimulatedPoint]) -> list[Row]:
    rows = []
    for num_workers, load in dict.fromkeys((point.num_workers, point.load) for point in points):
        same = {p.policy: p for p in points if (p.num_workers, p.load) == (num_workers, load)}
        first = next(iter(same.values()))
        p95 = (f"{same[policy].latencies.p95:.2f}" for policy in POLICIES)
        spent = sum(point.seconds for point in same.values()) / len(same)
        cells = (f"{num_workers:,}", f"{load:.0%}", f"{first.rate:.2f}", *p95, f"{first.num_edits:,}", f"{spent:.1f}")
        rows.append(row(NAME, *cells, key=("p95", num_workers, f"{load:g}")))
    return rows


def chart(points: list[SimulatedPoint], num_workers: int) -> Chart:
    own = [point for point in points if point.num_workers == num_workers]
    series = [Series(policy, [(p.rate, p.latencies.p95) for p in own if p.policy == policy]) for policy in POLICIES]
    rates = [round(point.rate, 3) for point in own]
    seconds = [point.latencies.p95 for point in own]
    title = f"P95 on {num_workers:,} workers"
    return Chart(title, at_values("edits per second and worker", rates), decades("P95, seconds", seconds), series)

"""Figure 12: latency of whole edits against the rate they arrive at, of several systems on one worker."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from instgenie.bench.engine import EngineStudy, measure_engine
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section, Table, row
from instgenie.bench.reproduce.serving import Run
from instgenie.bench.reproduce.sweeps import Found, sweep_chart, sweep_table
from instgenie.bench.reproduce.traffic import (
    MAX_BATCH_SIZE,
    Latencies,
    capacity,
    drawn_jobs,
    recipe,
    served,
    service_of,
)
from instgenie.bench.systems import DIFFUSERS, SKIPPING, suiting
from instgenie.bench.workload import draw_workload
from instgenie.simulate.cluster import ClusterShape, simulate
from instgenie.simulate.service import MeasuredService, Service

NAME = "fig12"
OURS, STATIC, FISEDIT = "instgenie", "static, dense engine", "FISEdit-style"
LOADS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
NUM_EDITS = 300

System = tuple[ClusterShape, Service]


def run(lab: Lab) -> Section:
    ours, static = served(lab), served(lab, batching="static", reuse=False)
    service = service_of(lab, ours)
    systems, most = make_systems(lab, service), capacity(lab, service)
    found: Found = {}
    for name, (shape, own) in systems.items():
        for load in LOADS:
            lab.tell(f"simulating {name} at {load:.0%}")
            workload = draw_workload(recipe(lab, NUM_EDITS, load * most, seed=3))
            jobs = drawn_jobs(lab, workload)
            simulate(shape, own, jobs)
            found[name, load * most] = Latencies.of([job.latency for job in jobs])
    real = {OURS: ours, STATIC: static}
    gain = Latencies.of_run(static).p95 / Latencies.of_run(ours).p95
    return Section(
        name=NAME,
        title="Latency against the rate of arrivals",
        paper="Mean latency of whole edits on a cluster, against diffusers, FISEdit and TeaCache, as the rate grows.",
        here=f"One worker (on a CPU: one core), production masks, {lab.scale.serve_steps} steps. Real: clusters under "
        f"the same edits, at {lab.scale.load:.0%} of what ours can do. Lines: simulated, with the step times measured "
        "in this run; all but ours prepare, denoise and finish one batch after the other, in one process.",
        tables=[real_table(real), sweep_table(NAME, "P95 in seconds, simulated", "system", found)],
        charts=[sweep_chart("P95 against rate", found)],
        findings=[
            f"On real clusters under the same load, P95 is {gain:.1f} times lower than with static dense batches."
        ],
    )


def make_systems(lab: Lab, service: Service) -> dict[str, System]:
    static = ClusterShape(1, MAX_BATCH_SIZE, batching="static", reuse=False)
    systems: dict[str, System] = {
        OURS: (ClusterShape(1, MAX_BATCH_SIZE), service),
        STATIC: (static, service),
        FISEDIT: (ClusterShape(1, 1, batching="static"), service),
    }
    for name, seconds in measure_steps(lab).items():
        systems[name] = static, MeasuredService(seconds, service.side)
    return systems


def measure_steps(lab: Lab) -> dict[str, dict[int, float]]:
    """Seconds of a step of those that see no masks, by number of jobs."""
    names = tuple(suiting((DIFFUSERS, SKIPPING), lab.model))
    study = EngineStudy(steps=lab.scale.engine_steps, repeats=1, batches=(1, lab.scale.batches[-1]), systems=names)
    lab.tell("step times of others")
    with one_core(lab):
        rows = measure_engine(lab.model, lab.size, study, lambda *_: None)
    return {name: {one.batch: one.step_ms / 1000 for one in rows if one.system == name} for name in names}


@contextmanager
def one_core(lab: Lab) -> Iterator[None]:
    """As the workers on a CPU have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if lab.model.device.type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def real_table(real: dict[str, Run]) -> Table:
    rows = []
    for name, run in real.items():
        latencies = Latencies.of_run(run)
        figures = (f"{value:.2f}" for value in (latencies.mean, latencies.p50, latencies.p95))
        rows.append(row(NAME, name, len(run.served), *figures, key=("real", name)))
    return Table("Real clusters", ("system", "edits", "mean s", "median s", "P95 s"), rows)

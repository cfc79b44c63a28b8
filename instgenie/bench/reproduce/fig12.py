"""Figure 12: latency of whole edits against the arrival rate, for several systems on one worker."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from instgenie.bench.engine import EngineStudy, measure_engine
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section
from instgenie.bench.reproduce.sweeps import SimulatedSystem, real_table, sweep, sweep_chart, sweep_table
from instgenie.bench.reproduce.traffic import MAX_BATCH_SIZE, capacity, run_latencies, served, service_of
from instgenie.bench.systems import DIFFUSERS, SKIPPING, suiting
from instgenie.simulate.cluster import ClusterShape
from instgenie.simulate.service import MeasuredService, Service

NAME = "fig12"
OURS, STATIC, FISEDIT = "instgenie", "static, dense engine", "FISEdit-style"
LOADS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)


def run(lab: Lab) -> Section:
    ours, static = served(lab), served(lab, batching="static", reuse=False)
    service = service_of(lab, ours)
    systems, most = make_systems(lab, service), capacity(lab, service)
    found = sweep(lab, systems, [load * most for load in LOADS], seed=3)
    real = {OURS: ours, STATIC: static}
    gain = run_latencies(static).p95 / run_latencies(ours).p95
    return Section(
        name=NAME,
        title="Latency against arrival rate",
        paper="The mean latency of whole edits on a cluster, against diffusers, FISEdit and TeaCache, as the arrival "
        "rate grows.",
        here=f"One worker (one core of a CPU), production masks, {lab.scale.serve_steps} steps. The real clusters get "
        f"the same edits, at {lab.scale.load:.0%} of the rate that ours sustains. The lines are simulated with the "
        "step times measured in this run; all systems but ours prepare, denoise and finish one batch after the other "
        "in one process.",
        tables=[
            real_table(NAME, "Real clusters", "system", real),
            sweep_table(NAME, "P95 in seconds, simulated", "system", found),
        ],
        charts=[sweep_chart("P95 against rate", found)],
        findings=[
            f"On real clusters under the same load, the P95 is {gain:.1f} times lower than with static dense batches."
        ],
    )


def make_systems(lab: Lab, service: Service) -> dict[str, SimulatedSystem]:
    static = ClusterShape(1, MAX_BATCH_SIZE, batching="static", reuse=False)
    systems: dict[str, SimulatedSystem] = {
        OURS: (ClusterShape(1, MAX_BATCH_SIZE), service),
        STATIC: (static, service),
        FISEDIT: (ClusterShape(1, 1, batching="static"), service),
    }
    for name, seconds in measure_steps(lab).items():
        systems[name] = static, MeasuredService(seconds, service.side)
    return systems


def measure_steps(lab: Lab) -> dict[str, dict[int, float]]:
    """Measure the seconds per step of the systems that ignore masks, by number of jobs."""
    names = tuple(suiting((DIFFUSERS, SKIPPING), lab.model))
    study = EngineStudy(steps=lab.scale.engine_steps, repeats=1, batches=(1, lab.scale.batches[-1]), systems=names)
    lab.tell("timing the steps of other systems")
    with one_core(lab):
        rows = measure_engine(lab.model, lab.size, study, lambda *_: None)
    return {name: {one.batch: one.step_ms / 1000 for one in rows if one.system == name} for name in names}


@contextmanager
def one_core(lab: Lab) -> Iterator[None]:
    """Compute with one thread on a CPU, as the workers do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if lab.model.device.type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Figure 16: ways of batching on real clusters, and routing policies on simulated ones."""

from dataclasses import replace
from typing import get_args

from instgenie.bench.latencies import Latencies
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section
from instgenie.bench.reproduce.serving import Run
from instgenie.bench.reproduce.sweeps import (
    NUM_EDITS,
    SimulatedSystem,
    Sweep,
    real_table,
    sweep,
    sweep_chart,
    sweep_table,
)
from instgenie.bench.reproduce.traffic import capacity, drawn_jobs, recipe, run_latencies, served, service_of
from instgenie.bench.workload import draw_workload
from instgenie.scheduling.names import Batching, RoutingPolicy
from instgenie.simulate.cluster import ClusterShape, simulate
from instgenie.simulate.service import Service

NAME = "fig16"
REAL: tuple[Batching, ...] = ("continuous", "static", "naive")
BATCHINGS: tuple[Batching, ...] = get_args(Batching)
POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)
LOADS = (0.3, 0.5, 0.7, 0.85)
NUM_WORKERS = 8


def run(lab: Lab) -> Section:
    real: dict[str, Run] = {batching: served(lab, batching) for batching in REAL}
    service = service_of(lab, real["continuous"])
    batching, policies = sweep_batching(lab, service), sweep_policies(lab, service)
    ours = run_latencies(real["continuous"]).p95
    gains = {name: 1 - ours / run_latencies(run).p95 for name, run in real.items() if name != "continuous"}
    return Section(
        name=NAME,
        title="Batching and load balancing",
        paper="P95 falls by 35 % against static batching and by 40 % against naive continuous batching; routing that "
        "sees masks beats routing by requests and by tokens.",
        here="Batching: real clusters of one worker, all of which reuse activations, get the same edits at "
        f"{lab.scale.load:.0%} of the rate that continuous batching sustains. A static worker prepares, denoises and "
        "finishes a batch before it takes the next; a naive one prepares and finishes between steps; both do so in one "
        "process. The lines are simulated; there, static-pipelined has processes of its own for preparing and "
        "finishing, as continuous has. Balancing: eight simulated workers; half of the edits have production masks and "
        "half inpainting masks, and a third of them have twice the steps.",
        tables=[
            real_table(
                NAME,
                "Batching, real clusters: seconds, and the mean seconds per stage",
                "batching",
                real,
                has_shares=True,
            ),
            sweep_table(NAME, "Batching, simulated: P95 in seconds", "batching", batching),
            sweep_table(NAME, "Balancing, simulated: P95 in seconds", "policy", policies),
        ],
        charts=[sweep_chart("Batching", batching), sweep_chart("Balancing of eight workers", policies)],
        findings=[
            "P95 of continuous batching on a real cluster: "
            + ", ".join(f"{-gain:+.0%} against {name}" for name, gain in gains.items())
            + "."
        ],
    )


def sweep_batching(lab: Lab, service: Service) -> Sweep:
    most = capacity(lab, service)
    systems: dict[str, SimulatedSystem] = {
        batching: (ClusterShape(1, batching=batching), service) for batching in BATCHINGS
    }
    return sweep(lab, systems, [load * most for load in LOADS], seed=4)


def sweep_policies(lab: Lab, service: Service) -> Sweep:
    most = capacity(lab, service)
    found: Sweep = {}
    for load in LOADS:
        for policy in POLICIES:
            lab.tell(f"simulating {policy} at {load:.0%}")
            num_edits, rate = NUM_EDITS * NUM_WORKERS // 2, 0.5 * load * most * NUM_WORKERS
            small = replace(recipe(lab, num_edits // 2, rate / 2, seed=5), num_templates=970)
            large = replace(small, mask_ratios="inpaint", seed=6)
            mixed = sorted([*draw_workload(small), *draw_workload(large)], key=lambda arrival: arrival.at)
            jobs = drawn_jobs(lab, mixed)
            for job in jobs[::3]:
                job.work = replace(job.work, num_steps=2 * job.work.num_steps)
            simulate(ClusterShape(NUM_WORKERS, policy=policy), service, jobs)
            found[policy, rate] = Latencies.of([job.latency for job in jobs])
    return found

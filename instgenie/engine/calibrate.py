"""Measures a device with the real engine and fits its latency: steps of several batches, transfers of several sizes.

Steps are one pass of the model over jobs whose masks differ, with everything cached, with half of every unit dense, and
with everything dense; nothing is loaded meanwhile. Of several rounds the fastest counts: what slows a pass down is work
that is not ours.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from instgenie.bench.edit import mask_around, now, sample_picture
from instgenie.bench.scatter import draw_scatter, write_text
from instgenie.cost.latency import Latency, LoadSample, StepSample, fit_latency, latency_path, write_latency
from instgenie.cost.network import NetworkShape
from instgenie.cost.planner import Plan
from instgenie.engine.demand import make_demands
from instgenie.engine.graphs import make_graphs
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.errors import CalibrationError
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job
from instgenie.machine.device import memory_guard
from instgenie.machine.names import device_name
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import check_edit
from instgenie.types import Edit

BATCHES = {"cpu": (1, 2, 4), "cuda": (1, 2, 4, 8)}
MASK_RATIOS = (0.05, 0.11, 0.2, 0.35, 0.6)
HALF_DENSE_RATIO = 0.2
MIDDLE = (0.5, 0.5)
MIN_ROUNDS, MAX_ROUNDS = 3, 12
NUM_WARM_UPS = 2  # where passes are captured when they come for the second time
ROUNDS_SECONDS = 20  # for all rounds; as many as fit
LOAD_BYTES = {"cpu": [2**power for power in range(18, 25)], "cuda": [2**power for power in range(18, 29)]}
NUM_COPIES = 8


@dataclass(frozen=True, eq=False)
class Case:
    """One step to measure."""

    name: str  # of its kind of plan
    jobs: tuple[Job, ...]
    plan: Plan


def calibrate(name: str, device: str, size: tuple[int, int] | None, out: Path | None) -> None:
    if out and not out.parent.is_dir():
        raise CalibrationError(f"{out} cannot be written: there is no folder {out.parent}")
    model = load(name, device)
    size = size or (model.own_size, model.own_size)
    network = model.describe()
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        with memory_guard("calibrating"):
            cases = make_cases(model, size)
            task = progress.add_task("steps", total=None)
            steps = measure_steps(
                model, network, cases, lambda at, most: progress.update(task, completed=at, total=most)
            )
        task = progress.add_task("loads", total=len(LOAD_BYTES[model.device.type]))
        loads = measure_loads(model.device, lambda: progress.advance(task))
    own_name = device_name(model.device)
    latency = fit_latency(own_name, name, network, steps, loads)
    path = out or latency_path(own_name, name)
    write_latency(latency, path)
    write_text(draw_steps(latency, network, cases, steps), path.with_suffix(".svg"))
    print_steps(latency, network, cases, steps)
    print_summary(latency, path, time.perf_counter() - start)


def make_cases(model: Model, size: tuple[int, int]) -> list[Case]:
    everything, nothing = (True,) * model.num_blocks, (False,) * model.num_blocks
    half = tuple(2 * block >= length for length in model.run_lengths for block in range(length))
    activations = register(sample_picture(size), model, size, steps=1)
    job = make_job(model, size, activations)

    def make_case(name: str, num_jobs: int, ratio: float, plan: Plan) -> Case:
        jobs = (mask_job(job, model, size, share) for share in shares(ratio, num_jobs))
        return Case(name, tuple(replace(one, plan=plan) for one in jobs), plan)

    batches = BATCHES[model.device.type]
    return [
        *(make_case("cached", batch, ratio, everything) for batch in batches for ratio in MASK_RATIOS),
        *(make_case("half dense", batch, HALF_DENSE_RATIO, half) for batch in batches),
        *(make_case("dense", batch, HALF_DENSE_RATIO, nothing) for batch in batches),
    ]


@torch.inference_mode()
def make_job(model: Model, size: tuple[int, int], activations: Activations) -> Job:
    mask = mask_around(MIDDLE, size, model.patch, HALF_DENSE_RATIO)
    edit = Edit(sample_picture(size), mask, "a flower", steps=1, guidance=model.guidance, size=size)
    check_edit(edit)
    return reuse(prepare(edit, model), activations)


def shares(ratio: float, num_jobs: int) -> list[float]:
    """From half the ratio to one and a half of it: a ragged batch, and the ratio in the mean."""
    return [ratio * (0.5 + (job + 0.5) / num_jobs) for job in range(num_jobs)]


def mask_job(job: Job, model: Model, size: tuple[int, int], ratio: float) -> Job:
    mask = token_mask(mask_around(MIDDLE, size, model.patch, ratio), model.patch)
    return replace(job, masked=torch.tensor(mask, device=model.device).reshape(-1, 1))


@torch.inference_mode()
def measure_steps(
    model: Model,
    network: NetworkShape,
    cases: Sequence[Case],
    on_round: Callable[[int, int], None],
    seconds: float = ROUNDS_SECONDS,
) -> list[StepSample]:
    """Rounds to warm up, one that says how many there is time for, then those; of each case the fastest."""
    graphs = make_graphs(model, max_graphs=len(cases))
    run = graphs.predict if graphs else model.predict
    for _ in range(NUM_WARM_UPS if graphs else 1):
        measure_round(run, model.device, cases)
    rounds = [measure_round(run, model.device, cases)]
    num_rounds = min(max(int(seconds / sum(rounds[0])), MIN_ROUNDS), MAX_ROUNDS)
    while len(rounds) < num_rounds:
        on_round(len(rounds), num_rounds)
        rounds.append(measure_round(run, model.device, cases))
    demands = [tuple(make_demands(case.jobs, network)) for case in cases]
    fastest = [min(times) for times in zip(*rounds, strict=True)]
    return [StepSample(*sample) for sample in zip(demands, (case.plan for case in cases), fastest, strict=True)]


def measure_round(run: Callable[[Sequence[Job]], object], device: torch.device, cases: Sequence[Case]) -> list[float]:
    seconds = []
    for case in cases:
        start = now(device)
        run(case.jobs)
        seconds.append(now(device) - start)
    return seconds


def measure_loads(device: torch.device, on_load: Callable[[], None]) -> list[LoadSample]:
    """From pinned memory to a CUDA device; on a CPU from memory to memory. Every copy is of other bytes where there are
    more, so that none comes out of a processor's cache."""
    sizes = LOAD_BYTES[device.type]
    host = torch.ones(2 * sizes[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(2 * sizes[-1], dtype=torch.uint8, device=device)
    samples = []
    for num_bytes in sizes:
        pairs = zip(there.split(num_bytes), host.split(num_bytes), strict=True)
        fastest = float("inf")
        for target, source in islice(cycle(pairs), NUM_COPIES):
            start = now(device)
            target.copy_(source, non_blocking=True)
            fastest = min(fastest, now(device) - start)
        samples.append(LoadSample(num_bytes, fastest))
        on_load()
    return samples


def draw_steps(latency: Latency, network: NetworkShape, cases: Sequence[Case], steps: Sequence[StepSample]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for case, step in zip(cases, steps, strict=True):
        predicted = predict(latency, network, step)
        points.setdefault(case.name, []).append((1000 * step.seconds, 1000 * predicted))
    title = f"{latency.model} on {latency.device}: R² {latency.r2_compute:.4f}"
    return draw_scatter(title, "measured, ms a step", "predicted", points)


def predict(latency: Latency, network: NetworkShape, step: StepSample) -> float:
    here = frozenset(range(len(network.blocks)))
    return latency.predict_step(network, [replace(demand, in_gpu=here) for demand in step.demands], step.plan)


def print_steps(latency: Latency, network: NetworkShape, cases: Sequence[Case], steps: Sequence[StepSample]) -> None:
    table = Table(title=f"{latency.model} on {latency.device}")
    for heading in ("plan", "jobs", "masked", "measured ms", "predicted ms", "off by"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for case, step in zip(cases, steps, strict=True):
        masked = sum(len(job.inside) for job in case.jobs) / sum(len(job.masked) for job in case.jobs)
        predicted = predict(latency, network, step)
        times = (f"{1000 * seconds:.2f}" for seconds in (step.seconds, predicted))
        table.add_row(case.name, str(len(case.jobs)), f"{masked:.2f}", *times, f"{predicted / step.seconds - 1:+.0%}")
    Console().print(table)


def print_summary(latency: Latency, path: Path, seconds: float) -> None:
    lines = {
        "compute": f"{rate(latency.flop, 1e12)} TFLOP/s, {1e3 * latency.block:.3g} ms a block",
        "load": f"{rate(latency.byte, 1e9)} GB/s, {1e6 * latency.load:.3g} µs a transfer",
        "R²": f"compute {latency.r2_compute:.4f}, load {latency.r2_load:.4f}",
        "seconds": f"{seconds:.1f}",
        "plot": f"{path.with_suffix('.svg')}",
    }
    for name, value in lines.items():
        print(f"{name:<8} {value}")
    print(path)


def rate(seconds: float, per: float) -> str:
    return f"{1 / seconds / per:.3g}" if seconds else "no end of"

"""Measures a device with the real engine and fits its latency: steps of several batches, transfers of several sizes.

A step is one pass of the model over jobs whose masks differ: with everything cached, with half of every unit dense, and
with everything dense; nothing is loaded meanwhile. The fastest of several rounds counts, because what slows a pass down
is other work on the machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch

from instgenie.cost.latency import Latency, LoadSample, StepSample, fit_latency
from instgenie.cost.network import NetworkShape
from instgenie.cost.plan import Plan
from instgenie.engine.demand import make_demands
from instgenie.engine.graphs import make_graphs
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.machine.device import device_name
from instgenie.machine.device_memory import memory_guard
from instgenie.models.model import Model
from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import check_edit
from instgenie.pictures.samples import MIDDLE, mask_around, sample_picture
from instgenie.types import Edit

BATCHES = {"cpu": (1, 2, 4), "cuda": (1, 2, 4, 8)}
MASK_RATIOS = (0.05, 0.11, 0.2, 0.35, 0.6)
HALF_DENSE_RATIO = 0.2
MIN_ROUNDS, MAX_ROUNDS = 3, 12
NUM_WARM_UPS = 2  # with CUDA graphs: a pass is captured when its shape comes for the second time
ROUNDS_SECONDS = 20.0  # for all rounds
LOAD_BYTES = {"cpu": [2**power for power in range(18, 25)], "cuda": [2**power for power in range(18, 29)]}
NUM_COPIES = 8


@dataclass(frozen=True, eq=False)
class Case:
    """One step to measure."""

    name: str  # the kind of plan
    jobs: tuple[Job, ...]
    plan: Plan

    @property
    def mask_ratio(self) -> float:
        return sum(len(job.inside) for job in self.jobs) / sum(len(job.masked) for job in self.jobs)


@dataclass(frozen=True)
class Calibration:
    """The measured steps and loads, and the latency model fitted to them."""

    latency: Latency
    cases: list[Case]
    steps: list[StepSample]
    loads: list[LoadSample]


def calibrate(
    model: Model,
    name: str,
    size: tuple[int, int],
    seconds: float = ROUNDS_SECONDS,
    on_round: Callable[[int, int], None] = lambda num_done, num_rounds: None,
    on_load: Callable[[int, int], None] = lambda num_done, num_loads: None,
) -> Calibration:
    """Measure steps for about `seconds`, then loads, and fit both."""
    network = model.describe()
    with memory_guard("calibrating"):
        cases = make_cases(model, size)
        steps = measure_steps(model, network, cases, on_round, seconds)
    loads = measure_loads(model.device, on_load)
    return Calibration(fit_latency(device_name(model.device), name, network, steps, loads), cases, steps, loads)


def make_cases(model: Model, size: tuple[int, int]) -> list[Case]:
    everything, nothing = (True,) * sum(model.run_lengths), (False,) * sum(model.run_lengths)
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
    """Return ratios from half of `ratio` to one and a half of it, with `ratio` as their mean: a ragged batch."""
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
    """Warm up, time one round to learn how many fit into `seconds`, run those, and keep the fastest time per case."""
    graphs = make_graphs(model, max_graphs=len(cases))
    run = graphs.predict if graphs else model.predict
    for _ in range(NUM_WARM_UPS if graphs else 1):
        measure_round(run, model.device, cases)
    rounds = [measure_round(run, model.device, cases)]
    num_rounds = min(max(int(seconds / sum(rounds[0])), MIN_ROUNDS), MAX_ROUNDS)
    on_round(1, num_rounds)
    while len(rounds) < num_rounds:
        rounds.append(measure_round(run, model.device, cases))
        on_round(len(rounds), num_rounds)
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


def measure_loads(device: torch.device, on_load: Callable[[int, int], None]) -> list[LoadSample]:
    """Time copies from pinned memory to a CUDA device, or from memory to memory on a CPU. Successive copies read
    different bytes where there are enough, so that none comes out of a processor's cache."""
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
        on_load(len(samples), len(sizes))
    return samples


def predict(latency: Latency, network: NetworkShape, step: StepSample) -> float:
    """Predict the seconds of a measured step."""
    here = frozenset(range(len(network.blocks)))
    return latency.predict_step(network, [replace(demand, in_gpu=here) for demand in step.demands], step.plan)

"""Section 6.6: the cost of serving beside the steps: routing, planning, joining a batch, registering, decoding."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from instgenie.bench.reproduce.fig4 import demand_of
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row
from instgenie.bench.router import decide
from instgenie.cluster.wire import BatchStepped, JobStep, decode, encode
from instgenie.cost.network import Demand
from instgenie.cost.planner import plan_batch
from instgenie.engine.finish import decode as decode_picture
from instgenie.engine.register import register, reuse
from instgenie.machine.clock import now
from instgenie.models.flux.model import is_flux
from instgenie.models.joint.batch import pack
from instgenie.models.joint.layout import lay_out
from instgenie.pictures.samples import MIDDLE, mask_around, sample_picture
from instgenie.scheduling.names import RoutingPolicy
from instgenie.types import PixelMask

NAME = "overheads"
BATCH_SIZE = 8
NUM_RUNS = 50
SCHEDULING_BAR, BATCHING_BAR = 0.6e-3, 1.2e-3  # seconds, as the paper reports them
RATIOS = (0.05, 0.11, 0.2, 0.35)


def run(lab: Lab) -> Section:
    choosing = measure_choosing(lab)
    lab.tell("planning and packing")
    planning = median(lambda: plan_batch(lab.network, demands(lab), lab.calibration.latency), NUM_RUNS)
    message = BatchStepped(0.1, 0.1, 0, tuple(JobStep(f"{job:032x}", 1, 3) for job in range(BATCH_SIZE)))
    telling = median(lambda: decode(encode(message)), NUM_RUNS)
    registering, num_bytes = measure_registering(lab)
    eight = next(seconds for policy, num, seconds in choosing if (policy, num) == ("mask_aware", lab.scale.workers[0]))
    rows = [
        row(NAME, "scheduling: choosing a worker", ms(eight), ms(SCHEDULING_BAR), key=("scheduling",)),
        row(NAME, "planning a step of a full batch", ms(planning), "", key=("planning",)),
        row(NAME, "encoding and decoding the report of a step", ms(telling), "", key=("telling",)),
    ]
    if is_flux(lab.model):  # a UNet packs tokens inside each of its transformers
        joining = ms(measure_joining(lab))
        rows.append(row(NAME, "batching: joining a full batch", joining, ms(BATCHING_BAR), key=("batching",)))
    about = f"{registering:.2f} s, {num_bytes / 1e6:.0f} MB for {lab.scale.steps} steps"
    return Section(
        name=NAME,
        title="Overheads",
        paper="Scheduling takes 0.6 ms and batching 1.2 ms.",
        here="Medians. Choosing is timed among busy workers; joining is the additional time that the first step of a "
        "changed batch takes to pack its jobs.",
        tables=[
            Table("Beside the steps", ("what", "ms", "paper, ms"), rows),
            Table("Choosing a worker", ("policy", *(f"{num:,} workers, ms" for num in lab.scale.workers)),
                  [choice_row(policy, choosing) for policy in get_args(RoutingPolicy)]),
            Table("Registering", ("what", "cost"), [row(NAME, "a template", about, key=("registering",))]),
            Table("Decoding the masked part of a picture", ("mask ratio", "ms"), decoding_rows(lab)),
        ],
        findings=[f"A worker is chosen in {ms(eight)} ms and a step of a full batch is planned in {ms(planning)} ms."],
    )  # fmt: skip


def measure_choosing(lab: Lab) -> list[tuple[RoutingPolicy, int, float]]:
    found = []
    for num_workers in lab.scale.workers:
        for policy in get_args(RoutingPolicy):
            lab.tell(f"choosing among {num_workers:,} workers, {policy}")
            seconds = statistics.median(decide(policy, num_workers, 4 * NUM_RUNS))
            found.append((policy, num_workers, seconds))
    return found


def choice_row(policy: RoutingPolicy, choosing: list[tuple[RoutingPolicy, int, float]]) -> Row:
    own = [ms(seconds) for name, _, seconds in choosing if name == policy]
    return row(NAME, policy, *own, key=("choosing", policy))


def demands(lab: Lab) -> list[Demand]:
    return [demand_of(lab, RATIOS[job % len(RATIOS)]) for job in range(BATCH_SIZE)]


def measure_joining(lab: Lab) -> float:
    """Return the additional seconds of packing a batch that has changed."""
    job = reuse(lab.job, lab.activations)
    job.step = job.edit.dense_steps
    jobs = [replace(job) for _ in range(BATCH_SIZE)]

    def pack_same() -> None:
        pack(jobs)
        now(lab.model.device)

    def pack_changed() -> None:
        lay_out.cache_clear()
        pack_same()

    return max(median(pack_changed, NUM_RUNS) - median(pack_same, NUM_RUNS), 0.0)


def measure_registering(lab: Lab) -> tuple[float, int]:
    lab.tell("registering")
    start = now(lab.model.device)
    activations = register(sample_picture(lab.size), lab.model, lab.size, lab.scale.steps)
    seconds = now(lab.model.device) - start
    return seconds, sum(rows.nbytes for rows in activations.rows)


def decoding_rows(lab: Lab) -> list[Row]:
    rows = []
    for ratio in lab.scale.mask_ratios:
        lab.tell(f"decoding, mask ratio {ratio:g}")
        mask = mask_around(MIDDLE, lab.size, lab.model.patch, ratio)
        seconds = median(partial(decode_one, lab, mask), lab.scale.repeats)
        rows.append(row(NAME, f"{ratio:g}", ms(seconds), key=("decoding", f"{ratio:g}")))
    return rows


@torch.inference_mode()
def decode_one(lab: Lab, mask: PixelMask) -> None:
    decode_picture([lab.job.latents], [mask], lab.job.grid, lab.model)
    now(lab.model.device)


def median(call: Callable[[], object], num_runs: int) -> float:
    seconds = []
    for _ in range(num_runs + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])

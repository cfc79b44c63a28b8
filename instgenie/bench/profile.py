"""Where the time of one step goes: the kernels of a step of one batch, counted, added up and grouped.

Steps are timed without the profiler first, so the table also says how much of a step no kernel runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from instgenie.bench.cost import job_flops
from instgenie.bench.files import check_folder, write_json
from instgenie.bench.machine import describe_machine, machine_text
from instgenie.bench.samples import make_edits
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import CacheDtype
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import show_status
from instgenie.types import Convolutions, Quantization, TextPadding

NUM_WARM, NUM_TIMED, NUM_PROFILED = 4, 6, 2  # steps: run and captured, timed, profiled
GROUPS = {  # the first whose pattern is in a kernel's name
    "attention": r"flash|fmha|attention|sdpa",
    "norms and modulation": r"modulate_kernel|layer_norm|group_norm|norm_kernel",
    "heads: norm, rotary embedding, places": r"place_kernel",
    "rows of activations": r"gather_kernel|fill_kernel|copy_kernel|unpack_kernel|store_kernel|pack_kernel",
    "activations and quantisation": r"gelu|quantize",
    "convolutions": r"conv|fprop|implicit",
    "products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|scaled_mm|addmm|aten::mm|aten::linear",
    "copies": r"memcpy|memset|copy|cat",
}
OTHERS = "others"


@dataclass(frozen=True)
class ProfileStudy:
    mask_ratio: float = 0.11
    batch: int = 1
    cache_dtype: CacheDtype = "model"
    dense: bool = False  # every token, without a template
    text_padding: TextPadding = "computed"
    graphs: bool = True
    quantization: Quantization | None = None
    convolutions: Convolutions = "dense"


@dataclass(frozen=True)
class KernelTime:
    name: str
    group: str
    count: float  # per step
    ms: float  # per step


def bench_profile(
    name: str, device: str, size: tuple[int, int] | None, study: ProfileStudy, json_path: Path | None
) -> None:
    check_folder(json_path)
    with show_status("loading the model"):
        model = load(name, device, quantization=study.quantization, convolutions=study.convolutions)
    with show_status("registering the sample picture"):
        jobs = make_jobs(model, size or (model.own_size, model.own_size), study)
    num_text = sum(num_computed_text(job) for job in jobs)
    num_image = sum(len(job.inside if job.activations else job.masked) * len(job.branches) for job in jobs)
    tera = sum(step_flops(model, job) for job in jobs) / 1e12
    with show_status("measuring"):
        step_ms, kernels = measure_steps(model, jobs, study.graphs)
    products = f"products in {study.quantization}" if study.quantization else "whole products"
    title = f"one step of {name}: {num_text} + {num_image} tokens, {tera:.2f} TFLOP, {products}"
    print_profile(title, step_ms, kernels, machine_text(describe_machine(model)))
    if json_path:
        rows = [vars(kernel) for kernel in kernels]
        write_json({"model": name, "study": vars(study), "step_ms": step_ms, "kernels": rows}, json_path)


def make_jobs(model: Model, size: tuple[int, int], study: ProfileStudy) -> list[Job]:
    steps = NUM_WARM + NUM_TIMED + NUM_PROFILED
    edits = make_edits(model, size, steps, study.mask_ratio, study.batch)
    jobs = [prepare(edit, model) for edit in edits]
    if study.dense:
        return jobs
    keeps_text = study.text_padding == "reused"
    kept = register(sample_picture(size), model, size, steps, cache_dtype=study.cache_dtype, keeps_text=keeps_text)
    return [reuse(job, kept) for job in jobs]


def num_computed_text(job: Job) -> int:
    reads_padding = job.activations is not None and job.activations.num_text > 0
    return sum(job.tokens.num_computed_text(reads_padding))


def step_flops(model: Model, job: Job) -> float:
    return job_flops(model, job) / job.num_steps


def measure_steps(model: Model, jobs: Sequence[Job], graphs: bool) -> tuple[float, list[KernelTime]]:
    """The milliseconds of a step, and its kernels, those that take longest first."""
    engine = Engine(model, len(jobs), graphs=make_graphs(model, graphs))
    for job in jobs:
        engine.join(job)
    take_steps(engine, NUM_WARM)
    start = now(model.device)
    take_steps(engine, NUM_TIMED)
    step_ms = 1000 * (now(model.device) - start) / NUM_TIMED
    on_cuda = model.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        take_steps(engine, NUM_PROFILED)
        now(model.device)  # waits for the device
    found = [
        KernelTime(
            name=event.key,
            group=group_of(event.key),
            count=event.count / NUM_PROFILED,
            ms=(event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1000 / NUM_PROFILED,
        )
        for event in profiler.key_averages()
    ]
    return step_ms, sorted((one for one in found if one.ms > 0), key=lambda one: -one.ms)


def take_steps(engine: Engine, num: int) -> None:
    for _ in range(num):
        engine.step()


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel.lower())), OTHERS)


def print_profile(title: str, step_ms: float, kernels: Sequence[KernelTime], machine: str, num_shown: int = 24) -> None:
    console = Console(width=max(Console().width, 120))
    groups = Table(title=title, caption=machine)
    kinds = Table(title="kernels")
    for table, heading in ((groups, "group"), (kinds, "kernel")):
        table.add_column(heading, no_wrap=True, max_width=70)
        for column in ("launches per step", "ms per step", "share"):
            table.add_column(column, justify="right")
    for group in [*GROUPS, OTHERS]:
        own = [kernel for kernel in kernels if kernel.group == group]
        add(groups, group, sum(one.count for one in own), sum(one.ms for one in own), step_ms)
    busy = sum(one.ms for one in kernels)
    add(groups, "no kernel runs, less those that overlap", 0, step_ms - busy, step_ms)
    add(groups, "a step", sum(one.count for one in kernels), step_ms, step_ms)
    for one in kernels[:num_shown]:
        add(kinds, one.name, one.count, one.ms, step_ms)
    console.print(groups)
    console.print(kinds)


def add(table: Table, name: str, count: float, ms: float, step_ms: float) -> None:
    table.add_row(name, f"{count:g}", f"{ms:.3f}", f"{ms / step_ms:.1%}")

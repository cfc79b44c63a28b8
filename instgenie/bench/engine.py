"""Throughput of the engine and of other systems against batch size, side by side in one run.

All systems take turns denoising the same batches: edits of one picture with masks drawn from a distribution. `steps/s`
counts the steps of single jobs: a batch of eight that takes one step per second makes eight.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.machine import Machine, describe_machine, machine_text
from instgenie.bench.pictures import draw_mask
from instgenie.bench.samples import PROMPT
from instgenie.bench.systems import COMPILED, CROP, DIFFUSERS, NAMES, make_system, suiting
from instgenie.bench.timing import System, measure
from instgenie.bench.workload import WorkloadRecipe, draw_workload
from instgenie.engine.register import register
from instgenie.jobs.activations import Activations
from instgenie.machine.device_memory import memory_guard
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import Convolutions, Edit

NUM_TUNING = 2
SYSTEMS = tuple(name for name in NAMES if name not in (COMPILED, CROP))


@dataclass(frozen=True)
class EngineStudy:
    steps: int = 8
    repeats: int = 3
    batches: tuple[int, ...] = (1, 2, 4, 8)
    mask_ratios: str = "production"
    systems: tuple[str, ...] = SYSTEMS
    seed: int = 0
    convolutions: Convolutions = "dense"  # of our engine


@dataclass(frozen=True)
class EngineRow:
    system: str
    batch: int
    step_ms: float  # per step of the whole batch
    steps_per_second: float  # steps of single jobs
    faster: float  # than diffusers at this batch size; 0 if diffusers was not measured


def bench_engine(
    name: str, device: str, size: tuple[int, int] | None, study: EngineStudy, json_path: Path | None
) -> None:
    check_folder(json_path)
    with show_status("loading the model"):
        model = load(name, device, convolutions=study.convolutions)
    with Progress(transient=True) as progress:
        task = progress.add("measuring")
        rows = measure_engine(model, size or (model.own_size, model.own_size), study, task.update)
    machine = describe_machine(model)
    print_rows(rows, f"{name}, masks {study.mask_ratios}, {study.steps} steps, median of {study.repeats}", machine)
    if json_path:
        write_json({"machine": machine, "study": asdict(study), "rows": [asdict(row) for row in rows]}, json_path)


def measure_engine(
    model: Model, size: tuple[int, int], study: EngineStudy, on_run: Callable[[int, int], None]
) -> list[EngineRow]:
    activations = register(sample_picture(size), model, size, study.steps)
    systems = make_systems(model, size, study, activations)
    rows: list[EngineRow] = []
    # CUDA graphs are captured for every batch size
    warmed = study.batches if model.device.type == "cuda" else study.batches[:1]
    total = (len(study.batches) * study.repeats + len(warmed)) * len(systems)
    num_done = 0

    def on_one() -> None:
        nonlocal num_done
        num_done += 1
        on_run(num_done, total)

    on_run(num_done, total)
    for batch in study.batches:
        edits = draw_edits(model, size, study, batch)
        with memory_guard(f"a batch of {batch} edits"):
            measure(systems, edits, int(batch in warmed), on_one)
            measured = measure(systems, edits, study.repeats, on_one)
        seconds = {
            system.name: statistics.median(timing.denoise for timing in timings) / study.steps
            for system, timings in measured.items()
        }
        base = seconds.get(DIFFUSERS, 0.0)
        rows += [
            EngineRow(system, batch, round(1000 * time, 3), round(batch / time, 3), round(base / time, 3))
            for system, time in seconds.items()
        ]
    return rows


def make_systems(model: Model, size: tuple[int, int], study: EngineStudy, activations: Activations) -> list[System]:
    tuning = draw_edits(model, size, study, NUM_TUNING)
    return [make_system(name, model, activations, tuning) for name in suiting(study.systems, model)]


def draw_edits(model: Model, size: tuple[int, int], study: EngineStudy, num: int) -> list[Edit]:
    recipe = WorkloadRecipe(num_edits=num, mask_ratios=study.mask_ratios, sizes=(size,), seed=study.seed)
    picture = sample_picture(size)
    return [
        Edit(
            picture,
            draw_mask(arrival.mask_ratio, arrival.mask_shape, arrival.seed, size),
            PROMPT,
            arrival.seed,
            study.steps,
            model.guidance,
            size=size,
        )
        for arrival in draw_workload(recipe)
    ]


def print_rows(rows: Sequence[EngineRow], title: str, machine: Machine) -> None:
    table = Table(title=title, caption=machine_text(machine))
    table.add_column("system")
    for heading in ("batch", "ms per step", "steps/s", "faster than diffusers"):
        table.add_column(heading, justify="right")
    for row in rows:
        faster = f"{row.faster:.2f}x" if row.faster else ""
        table.add_row(row.system, str(row.batch), f"{row.step_ms:.1f}", f"{row.steps_per_second:.2f}", faster)
    Console().print(table)

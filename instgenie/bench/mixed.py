"""Batches of edits of several sizes: passes per size, and one pass whose convolutions see tiles, side by side.

All systems run the same edits with the same weights up to the final latents. `dense` edits compute every token;
`cached` ones read templates that were registered beforehand, next to the model, with dense convolutions or, in one
pass, with convolutions that compute masked tiles alone.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.machine import describe_machine, machine_text
from instgenie.bench.samples import make_edits
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.machine.device_memory import memory_guard
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import CacheDtype, Convolutions, Edit

MAX_READERS = 64  # branches of a captured pass: batches of both systems are captured, or none is
CASES: tuple[tuple[str, Convolutions], ...] = (
    ("dense", "dense"), ("dense", "tiled"), ("cached", "dense"), ("cached", "tiled"), ("cached", "reused"),
)  # fmt: skip


@dataclass(frozen=True)
class MixedStudy:
    sizes: tuple[tuple[int, int], ...] = ((512, 512), (768, 768), (1024, 1024))
    batches: tuple[int, ...] = (3, 6, 12)
    steps: int = 8
    repeats: int = 3
    mask_ratio: float = 0.2
    cache_dtype: CacheDtype = "model"


@dataclass(frozen=True)
class MixedRow:
    edits: str  # dense or cached
    convolutions: Convolutions
    batch: int
    num_passes: int
    step_ms: float  # per step of the whole batch
    faster: float  # than passes per size
    apart: float  # largest difference of a latent from passes per size


class MixedSystem:
    """Jobs of one way to compute, through one engine after the other."""

    def __init__(self, model: Model, templates: dict[tuple[int, int], Activations] | None) -> None:
        self.model, self.templates = model, templates
        self.graphs = Graphs(model, max_readers=MAX_READERS) if model.device.type == "cuda" else None

    def job(self, edit: Edit) -> Job:
        job = prepare(edit, self.model)
        assert edit.size is not None
        return reuse(job, self.templates[edit.size]) if self.templates else job

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Tensor]]:
        """Seconds of all steps, and the final latents."""
        engine, own = Engine(self.model, len(jobs), graphs=self.graphs), [replace(job) for job in jobs]
        for job in own:
            engine.join(job)
        start = now(self.model.device)
        while engine.jobs:
            engine.step()
        return now(self.model.device) - start, [job.latents for job in own]


def bench_mixed(name: str, device: str, study: MixedStudy, json_path: Path | None, command: str) -> None:
    check_folder(json_path)
    with show_status("loading the model"):
        plain = load(name, device)
    models: dict[Convolutions, Model] = {how: plain.with_convolutions(how) for how in ("dense", "tiled", "reused")}
    with show_status("registering the sample picture"), memory_guard("the activations of templates"):
        kept = {how: register_all(models[how], study) for how in ("dense", "reused")}
    systems = {
        (edits, how): MixedSystem(
            models[how], kept["reused" if how == "reused" else "dense"] if edits == "cached" else None
        )
        for edits, how in CASES
    }
    rows: list[MixedRow] = []
    with Progress(transient=True) as progress:
        task = progress.add("measuring", len(CASES) * len(study.batches))
        for batch, (edits, how) in product(study.batches, CASES):
            base = next((row for row in rows if (row.edits, row.batch) == (edits, batch)), None)
            rows.append(measure_case(systems[edits, how], systems[edits, "dense"], study, batch, edits, how, base))
            task.advance()
    machine = describe_machine(plain)
    title = f"{name}, {', '.join(f'{width}x{height}' for height, width in study.sizes)}, mask ratio {study.mask_ratio}"
    print_rows(rows, title, machine_text(machine))
    if json_path:
        about = {"command": command, "model": name, "machine": machine, "study": asdict(study)}
        write_json(about | {"rows": [asdict(row) for row in rows]}, json_path)


def register_all(model: Model, study: MixedStudy) -> dict[tuple[int, int], Activations]:
    return {
        size: register(sample_picture(size), model, size, study.steps, cache_dtype=study.cache_dtype)
        for size in study.sizes
    }


@torch.inference_mode()
def measure_case(
    system: MixedSystem,
    per_size: MixedSystem,
    study: MixedStudy,
    batch: int,
    edits: str,
    how: Convolutions,
    base: MixedRow | None,
) -> MixedRow:
    asked = draw_edits(system.model, study, batch)
    jobs = [system.job(edit) for edit in asked]
    with memory_guard(f"a batch of {batch} edits"):
        system.run(jobs)  # also captures the pass
        timed = [system.run(jobs) for _ in range(study.repeats)]
        expected = per_size.run([per_size.job(edit) for edit in asked])[1]
    step_ms = 1000 * statistics.median(seconds for seconds, _ in timed) / study.steps
    apart = max(float((one - other).abs().max()) for one, other in zip(timed[0][1], expected, strict=True))
    faster = base.step_ms / step_ms if base else 1.0
    num_passes = len(system.model.passes(jobs))
    return MixedRow(edits, how, batch, num_passes, round(step_ms, 3), round(faster, 3), round(apart, 5))


def draw_edits(model: Model, study: MixedStudy, batch: int) -> list[Edit]:
    """Edits of all sizes in turn."""
    by_size = [
        make_edits(model, size, study.steps, study.mask_ratio, -(-(batch - number) // len(study.sizes)))
        for number, size in enumerate(study.sizes)
    ]
    return [by_size[number % len(by_size)][number // len(by_size)] for number in range(batch)]


def print_rows(rows: Sequence[MixedRow], title: str, caption: str) -> None:
    table = Table(title=title, caption=caption)
    table.add_column("edits")
    table.add_column("convolutions")
    for heading in ("jobs", "passes", "ms per step", "faster", "apart"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = str(row.batch), str(row.num_passes), f"{row.step_ms:.1f}", f"{row.faster:.2f}x", f"{row.apart:.2g}"
        table.add_row(row.edits, row.convolutions, *numbers)
    Console().print(table)

"""One edit through diffusers' own pipeline and through our engine, dense and cached, side by side in one run.

All run the same weights on the same device up to the final latents. `step` is the denoising alone, `edit` includes what
comes before it (text encoders, autoencoder). The cached system has registered the picture ahead.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from instgenie.batch import Job
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.errors import InstGenieError
from instgenie.mask import token_mask
from instgenie.models.flux_model import FluxModel
from instgenie.models.folder import PIPELINES
from instgenie.models.load import load
from instgenie.models.model import Model
from instgenie.models.unet_model import UnetXlModel
from instgenie.picture import check_edit
from instgenie.types import Edit, PixelMask, Pixels

MASK_RATIOS = (1.0, 0.2)


@dataclass(frozen=True)
class Sample:
    """Seconds of one run."""

    edit: float
    denoise: float


@dataclass(frozen=True)
class Row:
    system: str
    mask_ratio: float
    batch: int
    step_ms: float
    edit_ms: float


System = Callable[[Edit], Sample]


def bench_edit(
    name: str,
    device: str,
    size: tuple[int, int] | None,
    steps: int,
    repeats: int,
    mask_ratios: Sequence[float],
    json_path: Path | None,
) -> None:
    if json_path and not json_path.parent.is_dir():
        raise InstGenieError(f"{json_path} cannot be written: there is no folder {json_path.parent}")
    model = load(name, device)
    size = size or (model.own_size, model.own_size)
    systems = {
        "diffusers": stock_system(model),
        "dense": dense_system(model),
        "cached": cached_system(model, size, steps),
    }
    masks = [middle_mask(size, model.patch, ratio) for ratio in mask_ratios]
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(masks) * repeats * len(systems))
        for mask in masks:
            edit = Edit(sample_picture(size), mask, "a flower", steps=steps, guidance=model.guidance, size=size)
            check_edit(edit)
            measured = measure(systems, edit, repeats, lambda: progress.advance(task))
            ratio = float(token_mask(mask, model.patch).mean())
            rows += [make_row(system, ratio, samples, steps) for system, samples in measured.items()]
    machine = describe_machine(model)
    print_rows(rows, machine, f"{name}, {size[1]}x{size[0]}, {steps} steps, median of {repeats}")
    if json_path:
        write_json({"machine": machine, "rows": [asdict(row) for row in rows]}, json_path)


def write_json(report: object, path: Path) -> None:
    partial = path.with_name(f".{os.getpid()}-{path.name}.partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)


def measure(
    systems: dict[str, System], edit: Edit, repeats: int, on_run: Callable[[], None]
) -> dict[str, list[Sample]]:
    """Every system once to warm up, then all of them `repeats` times, who goes first alternating."""
    for system in systems.values():
        system(edit)
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    order = list(systems)
    for _ in range(repeats):
        for name in order:
            samples[name].append(systems[name](edit))
            on_run()
        order.reverse()
    return samples


def make_row(system: str, mask_ratio: float, samples: list[Sample], steps: int) -> Row:
    denoise = statistics.median(sample.denoise for sample in samples)
    edit = statistics.median(sample.edit for sample in samples)
    return Row(system, round(mask_ratio, 3), 1, round(1000 * denoise / steps, 3), round(1000 * edit, 3))


def dense_system(model: Model) -> System:
    return own_system(model, lambda edit: prepare(edit, model))


def cached_system(model: Model, size: tuple[int, int], steps: int) -> System:
    activations = register(sample_picture(size), model, size, steps)
    return own_system(model, lambda edit: reuse(prepare(edit, model), activations))


def own_system(model: Model, make_job: Callable[[Edit], Job]) -> System:
    def run(edit: Edit) -> Sample:
        start = now(model.device)
        engine = Engine(model)
        job = make_job(edit)
        engine.join(job)
        prepared = now(model.device)
        while not job.done:
            engine.step()
        end = now(model.device)
        return Sample(edit=end - start, denoise=end - prepared)

    return run


def stock_system(model: Model) -> System:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    options = {} if stock_name(model) == "FluxFillPipeline" else {"strength": 1.0}
    if isinstance(model, FluxModel):
        options["max_sequence_length"] = model.max_text_tokens

    def run(edit: Edit) -> Sample:
        height, width, _ = edit.picture.shape
        prepared: list[float] = []

        def on_forward(*_: object) -> None:
            if not prepared:
                prepared.append(now(model.device))

        hook = model.network.register_forward_pre_hook(on_forward)
        start = now(model.device)
        pipeline(
            prompt=edit.prompt,
            image=Image.fromarray(edit.picture),
            mask_image=Image.fromarray(edit.mask),
            height=height,
            width=width,
            num_inference_steps=edit.steps,
            guidance_scale=edit.guidance,
            generator=torch.Generator().manual_seed(edit.seed),
            output_type="latent",
            **options,
        )
        end = now(model.device)
        hook.remove()
        return Sample(edit=end - start, denoise=end - prepared[0])

    return run


def stock_pipeline(model: Model) -> diffusers.DiffusionPipeline:
    """diffusers' own inpainting pipeline around the model's parts; its scheduler is its own, for it changes it."""
    name = stock_name(model)
    parts = {part: getattr(model, part) for part in PIPELINES[name]}
    parts["scheduler"] = type(model.scheduler).from_config(model.scheduler.config)
    if name == "StableDiffusionInpaintPipeline":
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return getattr(diffusers, name)(**parts)


def stock_name(model: Model) -> str:
    if isinstance(model, FluxModel):
        return "FluxFillPipeline" if model.is_fill else "FluxInpaintPipeline"
    return "StableDiffusionXLInpaintPipeline" if isinstance(model, UnetXlModel) else "StableDiffusionInpaintPipeline"


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def sample_picture(size: tuple[int, int]) -> Pixels:
    height, width = size
    across = np.broadcast_to(np.linspace(0, 255, width), size)
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], size)
    return np.stack([across, down, across[:, ::-1]], axis=2).astype(np.uint8)


def middle_mask(size: tuple[int, int], patch: int, ratio: float) -> PixelMask:
    """The tokens nearest to the middle, as many as the ratio says."""
    num_rows, num_columns = (side // patch for side in size)
    y, x = np.mgrid[:num_rows, :num_columns]
    distance = np.hypot((y + 0.5) / num_rows - 0.5, (x + 0.5) / num_columns - 0.5).ravel()
    tokens = np.zeros(num_rows * num_columns, np.bool_)
    tokens[np.argsort(distance, kind="stable")[: max(round(ratio * tokens.size), 1)]] = True
    return tokens.reshape(num_rows, num_columns).repeat(patch, axis=0).repeat(patch, axis=1)


def describe_machine(model: Model) -> dict[str, str | int]:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": version("torch"),
        "diffusers": version("diffusers"),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_rows(rows: list[Row], machine: dict[str, str | int], title: str) -> None:
    table = Table(title=title, caption=", ".join(f"{name} {value}" for name, value in machine.items()))
    table.add_column("system")
    for heading in ("mask ratio", "batch", "step ms", "ratio", "edit ms", "ratio"):
        table.add_column(heading, justify="right")
    stock = {row.mask_ratio: row for row in rows if row.system == "diffusers"}
    for row in rows:
        base = stock[row.mask_ratio]
        step, edit = row.step_ms / base.step_ms, row.edit_ms / base.edit_ms
        table.add_row(
            row.system,
            f"{row.mask_ratio:.2f}",
            str(row.batch),
            f"{row.step_ms:.2f}",
            f"{step:.3f}",
            f"{row.edit_ms:.0f}",
            f"{edit:.3f}",
            end_section=row.system == "cached",
        )
    Console().print(table)

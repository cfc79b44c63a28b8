"""Edits through diffusers' own pipeline and through our engine, dense and cached, side by side in one run.

All run the same weights on the same device up to the final latents. `step` is the denoising alone, `edit` includes what
comes before it (text encoders, autoencoder). A batch is several edits of one picture, with masks of one size at
different places. The cached system has registered the picture ahead; its activations lie next to the model, or in main
memory, from where they are loaded while it computes. `compiled` is diffusers with compiled transformer blocks.
"""

import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from instgenie.cache.host import HostTier
from instgenie.cost.latency import find_latency
from instgenie.engine.graphs import Graphs, make_graphs
from instgenie.engine.loading.lanes import Rows
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loop import Engine
from instgenie.engine.planning import Planning
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, register, reuse
from instgenie.errors import InstGenieError
from instgenie.jobs.activations import Activations, CacheDtype, Kind, Span
from instgenie.jobs.job import Job
from instgenie.kernels import switch
from instgenie.machine.device import memory_guard
from instgenie.machine.names import device_name
from instgenie.models.flux.model import FluxModel
from instgenie.models.loading.folder import PIPELINES
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel, UnetXlModel
from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import check_edit
from instgenie.types import Edit, PixelMask, Pixels, PlanPolicy, TierName


@dataclass(frozen=True)
class Study:
    """What to measure."""

    steps: int = 28
    repeats: int = 5
    mask_ratios: tuple[float, ...] = (1.0, 0.2)
    batches: tuple[int, ...] = (1,)
    kinds: tuple[Kind, ...] = ("kv",)
    cache_dtypes: tuple[CacheDtype, ...] = ("model",)
    tiers: tuple[TierName, ...] = ("gpu",)  # gpu: next to the model, whatever its device
    policies: tuple[PlanPolicy, ...] = ("cached",)  # where anything is loaded
    rows: Rows = "auto"
    systems: tuple[str, ...] = ("diffusers", "dense", "cached")
    graphs: bool = True


@dataclass(frozen=True)
class Sample:
    """Seconds of one run."""

    edit: float
    denoise: float


@dataclass(frozen=True)
class Reuse:
    """How a system is cached."""

    kind: Kind
    cache_dtype: CacheDtype
    tier: TierName
    policy: PlanPolicy


@dataclass(frozen=True)
class System:
    name: str
    reuse: Reuse | None  # where it is cached
    run: Callable[[Sequence[Edit]], Sample]


@dataclass(frozen=True)
class Row:
    system: str
    kind: Kind | None
    cache_dtype: CacheDtype | None
    tier: TierName | None
    policy: PlanPolicy | None
    mask_ratio: float
    batch: int
    step_ms: float  # of the whole batch
    edit_ms: float  # of the whole batch


def bench_edit(name: str, device: str, size: tuple[int, int] | None, study: Study, json_path: Path | None) -> None:
    if json_path and not json_path.parent.is_dir():
        raise InstGenieError(f"{json_path} cannot be written: there is no folder {json_path.parent}")
    model = load(name, device)
    size = size or (model.own_size, model.own_size)
    with memory_guard("the activations of a template"):
        systems = make_systems(name, model, size, study)
    rows: list[Row] = []
    warm: set[tuple[System, int]] = set()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        cases = list(product(study.mask_ratios, study.batches))
        task = progress.add_task("measuring", total=len(cases) * study.repeats * len(systems))
        for ratio, batch in cases:
            edits = make_edits(model, size, study.steps, ratio, batch)
            with memory_guard(f"a batch of {batch} edits"):
                warm |= warm_up(systems, edits, warm)
                measured = measure(systems, edits, study.repeats, lambda: progress.advance(task))
            real_ratio = float(token_mask(edits[0].mask, model.patch).mean())
            rows += [make_row(system, real_ratio, batch, samples, study.steps) for system, samples in measured.items()]
    machine = describe_machine(model) | {"graphs": "on" if study.graphs and model.device.type == "cuda" else "off"}
    print_rows(rows, machine, f"{name}, {size[1]}x{size[0]}, {study.steps} steps, median of {study.repeats}")
    if json_path:
        write_json({"machine": machine, "rows": [asdict(row) for row in rows]}, json_path)


def make_systems(name: str, model: Model, size: tuple[int, int], study: Study) -> list[System]:
    graphs = make_graphs(model, study.graphs)
    made = {
        "diffusers": lambda: [stock_system(model)],
        "compiled": lambda: [compiled_system(model)],
        "dense": lambda: [own_system("dense", None, model, lambda edit: prepare(edit, model), graphs=graphs)],
        "cached": lambda: list(cached_systems(name, model, size, study, graphs)),
    }
    return [system for name in study.systems for system in made[name]()]


def make_edits(model: Model, size: tuple[int, int], steps: int, ratio: float, batch: int) -> list[Edit]:
    """The first mask is in the middle; irrational steps lead the others around."""
    picture = sample_picture(size)
    centres = [((0.5 + 0.618 * index) % 1, (0.5 + 0.755 * index) % 1) for index in range(batch)]
    edits = [
        Edit(picture, mask_around(centre, size, model.patch, ratio), "a flower", seed, steps, model.guidance, size=size)
        for seed, centre in enumerate(centres)
    ]
    for edit in edits:
        check_edit(edit)
    return edits


def write_json(report: object, path: Path) -> None:
    partial = path.with_name(f".{os.getpid()}-{path.name}.partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)


def warm_up(systems: Sequence[System], edits: Sequence[Edit], warm: set[tuple[System, int]]) -> set[tuple[System, int]]:
    """Every system once; those that compute every token, whatever is masked, once for each batch."""
    cold = {(system, len(edits)) for system in systems} - warm
    for system, _ in cold:
        system.run(edits)
    return {(system, batch) for system, batch in cold if system.reuse is None}


def measure(
    systems: Sequence[System], edits: Sequence[Edit], repeats: int, on_run: Callable[[], None]
) -> dict[System, list[Sample]]:
    """All systems `repeats` times, who goes first alternating."""
    samples: dict[System, list[Sample]] = {system: [] for system in systems}
    order = list(systems)
    for _ in range(repeats):
        for system in order:
            samples[system].append(system.run(edits))
            on_run()
        order.reverse()
    return samples


def make_row(system: System, mask_ratio: float, batch: int, samples: list[Sample], steps: int) -> Row:
    denoise = statistics.median(sample.denoise for sample in samples)
    edit = statistics.median(sample.edit for sample in samples)
    how = system.reuse
    return Row(
        system=system.name,
        kind=how.kind if how else None,
        cache_dtype=how.cache_dtype if how else None,
        tier=how.tier if how else None,
        policy=how.policy if how else None,
        mask_ratio=round(mask_ratio, 3),
        batch=batch,
        step_ms=round(1000 * denoise / steps, 3),
        edit_ms=round(1000 * edit, 3),
    )


def cached_systems(
    name: str, model: Model, size: tuple[int, int], study: Study, graphs: Graphs | None
) -> Iterator[System]:
    """Next to the model there is nothing to load, and so nothing to plan."""
    latency = find_latency(device_name(model.device), name, model.device.type)
    ahead, naive = Loader(model, rows=study.rows), Loader(model, max_buffers=1, rows=study.rows)
    host = HostTier(sys.maxsize)
    for kind, cache_dtype in product(study.kinds, study.cache_dtypes):
        near = register(sample_picture(size), model, size, study.steps, kind=kind, cache_dtype=cache_dtype)
        if "gpu" in study.tiers:
            how = Reuse(kind, cache_dtype, "gpu", "cached")
            yield own_system("cached", how, model, with_activations(model, near), None, ahead, graphs)
        if "host" in study.tiers:
            far = move_to_host(near, host, model)
            for policy in study.policies:
                how = Reuse(kind, cache_dtype, "host", policy)
                planning, make_job = Planning(model, latency, policy), with_activations(model, far)
                loading = (naive, None) if policy == "naive" else (ahead, graphs)
                yield own_system("cached", how, model, make_job, planning, *loading)


def with_activations(model: Model, activations: Activations) -> Callable[[Edit], Job]:
    return lambda edit: reuse(prepare(edit, model), activations)


def move_to_host(near: Activations, host: HostTier, model: Model) -> Activations:
    key = near.key
    host.store(key, Span(key.steps, near.rows, near.time))
    span = host.load(key, key.steps)
    assert span is not None
    return make_activations(key, span, model)


def own_system(
    name: str,
    how: Reuse | None,
    model: Model,
    make_job: Callable[[Edit], Job],
    planning: Planning | None = None,
    loader: Loader | None = None,
    graphs: Graphs | None = None,
) -> System:
    def run(edits: Sequence[Edit]) -> Sample:
        start = now(model.device)
        engine = Engine(model, len(edits), planning, loader, graphs)
        for edit in edits:
            engine.join(make_job(edit))
        prepared = now(model.device)
        while engine.jobs:
            engine.step()
        end = now(model.device)
        return Sample(edit=end - start, denoise=end - prepared)

    return System(name, how, run)


def compiled_system(model: Model) -> System:
    """The same modules as diffusers': their blocks are compiled while this system runs, and no longer."""
    network: Any = stock_network(model)
    stock = stock_system(model, network)
    network.compile_repeated_blocks(fullgraph=True)
    calls = {module: module._compiled_call_impl for module in network.modules()}
    compiled = {module: call for module, call in calls.items() if call is not None}
    set_calls(dict.fromkeys(compiled))

    def run(edits: Sequence[Edit]) -> Sample:
        set_calls(compiled)
        try:
            return stock.run(edits)
        finally:
            set_calls(dict.fromkeys(compiled))

    return replace(stock, name="compiled", run=run)


def set_calls(calls: Mapping[torch.nn.Module, Callable[..., Any] | None]) -> None:
    """What calling a module does; None: what it says."""
    for module, call in calls.items():
        module._compiled_call_impl = call


def stock_system(model: Model, network: torch.nn.Module | None = None) -> System:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    network = network or stock_network(model)
    pipeline.register_modules(**{"transformer" if isinstance(model, FluxModel) else "unet": network})
    options = {} if stock_name(model) == "FluxFillPipeline" else {"strength": 1.0}
    if isinstance(model, FluxModel):
        options["max_sequence_length"] = model.num_text_tokens

    def run(edits: Sequence[Edit]) -> Sample:
        first = edits[0]
        height, width, _ = first.picture.shape
        prepared: list[float] = []

        def on_forward(*_: object) -> None:
            if not prepared:
                prepared.append(now(model.device))

        hook = network.register_forward_pre_hook(on_forward)
        start = now(model.device)
        pipeline(
            prompt=[edit.prompt for edit in edits],
            image=[Image.fromarray(edit.picture) for edit in edits],
            mask_image=[Image.fromarray(edit.mask) for edit in edits],
            height=height,
            width=width,
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            generator=torch.Generator().manual_seed(first.seed),
            output_type="latent",
            **options,
        )
        end = now(model.device)
        hook.remove()
        return Sample(edit=end - start, denoise=end - prepared[0])

    return System("diffusers", None, run)


def stock_network(model: Model) -> torch.nn.Module:
    is_reordered = isinstance(model, UnetModel) and model.device.type == "cuda"
    return in_stock_order(model.network) if is_reordered else model.network


def in_stock_order(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, with weights in the order in which diffusers loads them; ours may be in another."""
    return copy.deepcopy(module).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]


def stock_pipeline(model: Model) -> diffusers.DiffusionPipeline:
    """diffusers' own inpainting pipeline around the model's parts; its autoencoder is a copy in its order, and its
    scheduler its own, for it changes it."""
    name = stock_name(model)
    parts = {part: getattr(model, part) for part in PIPELINES[name]}
    parts["vae"] = in_stock_order(model.vae)
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


def mask_around(centre: tuple[float, float], size: tuple[int, int], patch: int, ratio: float) -> PixelMask:
    """The tokens nearest to a point, given in shares of height and width; as many as the ratio says."""
    num_rows, num_columns = (side // patch for side in size)
    y, x = np.mgrid[:num_rows, :num_columns]
    distance = np.hypot((y + 0.5) / num_rows - centre[0], (x + 0.5) / num_columns - centre[1]).ravel()
    tokens = np.zeros(num_rows * num_columns, np.bool_)
    tokens[np.argsort(distance, kind="stable")[: max(round(ratio * tokens.size), 1)]] = True
    return tokens.reshape(num_rows, num_columns).repeat(patch, axis=0).repeat(patch, axis=1)


def describe_machine(model: Model) -> dict[str, str | int]:
    is_cuda = model.device.type == "cuda"
    return {
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": version("torch"),
        "cuda": (torch.version.cuda or "none") if is_cuda else "none",
        "kernels": "on" if switch.runs_fused(torch.empty(0, device=model.device)) else "off",
        "diffusers": version("diffusers"),
    }


def print_rows(rows: list[Row], machine: dict[str, str | int], title: str) -> None:
    table = Table(title=title, caption=", ".join(f"{name} {value}" for name, value in machine.items()))
    table.add_column("system", no_wrap=True)
    for heading in ("mask ratio", "batch", "step ms", "faster", "edit ms", "faster"):
        table.add_column(heading, justify="right")
    stock = {(row.mask_ratio, row.batch): row for row in rows if row.system == "diffusers"}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        base = stock.get((row.mask_ratio, row.batch))
        table.add_row(
            " ".join(filter(None, [row.system, row.kind, row.cache_dtype, row.tier, row.policy])),
            f"{row.mask_ratio:.2f}",
            str(row.batch),
            f"{row.step_ms:.2f}",
            f"{base.step_ms / row.step_ms:.2f}x" if base else "",
            f"{row.edit_ms:.0f}",
            f"{base.edit_ms / row.edit_ms:.2f}x" if base else "",
            end_section=following is not None
            and (following.mask_ratio, following.batch) != (row.mask_ratio, row.batch),
        )
    Console().print(table)

"""Edits through diffusers' own pipeline and through our engine, dense and cached, side by side in one run.

All systems run the same weights on the same device up to the final latents. `step` is the denoising alone; `edit` also
includes what precedes it (text encoders, autoencoder). A batch is several edits of one picture, with masks of one size
at different places. The cached system has registered the picture beforehand; its activations lie next to the model, or
in main memory, from where they are loaded during the steps. `own` edits the picture as if it was never seen: it reads
what its own dense steps leave behind. `compiled` is diffusers with compiled transformer blocks, `reference`
its pipeline that keeps K and V of the picture it sees, which knows no mask. Systems that compute every token take the
same time for every mask: they are measured beside the others at the first mask ratio, and count for all.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.machine import Machine, describe_machine, machine_text
from instgenie.bench.ours import cached_jobs, cold_jobs, dense_jobs, move_to_host, own_system
from instgenie.bench.samples import make_edits
from instgenie.bench.stock import compiled_system, reference_system, stock_system
from instgenie.bench.timing import Caching, System, Timing, measure
from instgenie.cache.host import HostTier
from instgenie.cost.latency import calibrated_name, find_latency
from instgenie.engine.graphs import Graphs, make_graphs
from instgenie.engine.loading.lanes import RowChoice
from instgenie.engine.loading.loader import Loader
from instgenie.engine.planning import Planning
from instgenie.engine.register import register
from instgenie.jobs.activations import CacheDtype, Kind
from instgenie.jobs.quality import Quality
from instgenie.machine.device import device_name
from instgenie.machine.device_memory import memory_guard, peak_gib, used_gib
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.mask import token_mask
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import Convolutions, Edit, PlanPolicy, Quantization, TextPadding, TierName

TABLE_WIDTH = 100
OWN = Caching("kv", "model", "gpu", "cached")  # how an edit keeps what its own dense steps leave behind


@dataclass(frozen=True)
class EditStudy:
    """The cases to measure: every mask ratio with every batch size, through every system."""

    steps: int = 28
    repeats: int = 5
    mask_ratios: tuple[float, ...] = (1.0, 0.2)
    batches: tuple[int, ...] = (1,)
    kinds: tuple[Kind, ...] = ("kv",)
    cache_dtypes: tuple[CacheDtype, ...] = ("model",)
    cache_stride: int = 1  # every so many steps of the template are kept
    text_padding: TextPadding = "computed"
    tiers: tuple[TierName, ...] = ("gpu",)  # gpu: next to the model, whatever its device
    policies: tuple[PlanPolicy, ...] = ("cached",)  # for activations that are loaded
    rows: RowChoice = "auto"
    systems: tuple[str, ...] = ("diffusers", "dense", "own", "cached")
    quality: Quality = "balanced"  # of `own`
    convolutions: Convolutions = "dense"  # of our engine
    quantization: Quantization | None = None  # of our engine's products; diffusers computes with the whole weights
    graphs: bool = True

    @property
    def keeps_text(self) -> bool:
        return self.text_padding == "reused"


@dataclass(frozen=True)
class EditRow:
    system: str
    kind: Kind | None
    cache_dtype: CacheDtype | None
    tier: TierName | None
    policy: PlanPolicy | None
    mask_ratio: float
    batch: int
    step_ms: float  # per step of the whole batch
    edit_ms: float  # for the whole batch
    peak_gib: (
        float | None
    )  # of GPU memory while the systems of this case run: with the model, templates, diffusers' copies


def bench_edit(
    name: str, device: str, size: tuple[int, int] | None, study: EditStudy, json_path: Path | None, command: str
) -> None:
    """Measure and print. The JSON file also keeps `command`, the command line that measures this again."""
    check_folder(json_path)
    with show_status("loading the model"):
        model = load(name, device, quantization=study.quantization, convolutions=study.convolutions)
    loaded_gib = used_gib(model.device)
    size = size or (model.own_size, model.own_size)
    rows: list[EditRow] = []
    blind: dict[int, dict[System, list[Timing]]] = {}  # by batch size: of systems whose time no mask changes
    cases = list(product(study.mask_ratios, study.batches))
    with show_status("registering the sample picture"), memory_guard("the activations of a template"):
        systems = make_systems(name, model, size, study)
    peak_gib(model.device)  # what loading and registering took is none of a batch's
    with Progress(transient=True) as progress:
        num_seeing = sum(system.sees_masks for system in systems)
        num_runs = len(cases) * num_seeing + len(study.batches) * (len(systems) - num_seeing)
        task = progress.add("measuring", num_runs * study.repeats)
        for ratio, batch in cases:
            edits = make_edits(model, size, study.steps, ratio, batch)
            with memory_guard(f"a batch of {batch} edits"):
                chosen = [system for system in systems if system.sees_masks or batch not in blind]
                warm_up(chosen, edits)
                measured = measure(chosen, edits, study.repeats, task.advance)
            known = blind.setdefault(
                batch, {system: timings for system, timings in measured.items() if not system.sees_masks}
            )
            peak = peak_gib(model.device)
            real_ratio = float(token_mask(edits[0].mask, model.patch).mean())
            rows += [
                make_row(system, real_ratio, batch, (known | measured)[system], study.steps, peak) for system in systems
            ]
    machine = describe_machine(model) | {"graphs": "on" if study.graphs and model.device.type == "cuda" else "off"}
    machine |= {"GiB after loading": loaded_gib} if loaded_gib else {}
    products = f", products in {study.quantization}" if study.quantization else ""
    print_rows(rows, machine, f"{name}{products}, {size[1]}x{size[0]}, {study.steps} steps, median of {study.repeats}")
    if json_path:
        about = {"command": command, "model": name, "size": size, "steps": study.steps, "machine": machine}
        padding = "reused" if study.keeps_text else "computed"
        about |= {"quantization": study.quantization, "cache_stride": study.cache_stride, "text_padding": padding}
        about |= {"convolutions": study.convolutions}
        write_json(about | {"rows": [asdict(row) for row in rows]}, json_path)


def make_systems(name: str, model: Model, size: tuple[int, int], study: EditStudy) -> list[System]:
    graphs = make_graphs(model, study.graphs)
    stock = load_stock(name, model, study)
    makers = {
        "diffusers": lambda: [stock_system(stock)],
        "compiled": lambda: [compiled_system(stock)],
        "reference": lambda: [reference_system(stock)],
        "dense": lambda: [own_system("dense", None, model, dense_jobs(model), graphs=graphs)],
        "own": lambda: [
            own_system("own", OWN, model, cold_jobs(model, study.quality), graphs=graphs, keeps_text=study.keeps_text)
        ],
        "cached": lambda: list(cached_systems(name, model, size, study, graphs)),
    }
    return [system for name in study.systems for system in makers[name]()]


def load_stock(name: str, model: Model, study: EditStudy) -> Model:
    """The model that diffusers runs: ours, or one with whole weights beside ours with quantised ones."""
    is_needed = study.quantization and not {"diffusers", "compiled", "reference"}.isdisjoint(study.systems)
    return load(name, str(model.device)) if is_needed else model


def cached_systems(
    name: str, model: Model, size: tuple[int, int], study: EditStudy, graphs: Graphs | None
) -> Iterator[System]:
    """Make one system per kind, dtype, tier and policy; activations next to the model need no policy."""
    calibrated = calibrated_name(name, study.quantization)
    latency = find_latency(device_name(model.device), calibrated, model.device.type)
    ahead, naive = Loader(model, rows=study.rows), Loader(model, max_buffers=1, rows=study.rows)
    host = HostTier(sys.maxsize)
    for kind, cache_dtype in product(study.kinds, study.cache_dtypes):
        near = register(
            sample_picture(size),
            model,
            size,
            study.steps,
            kind=kind,
            cache_dtype=cache_dtype,
            stride=study.cache_stride,
            keeps_text=study.keeps_text,
        )
        if "gpu" in study.tiers:
            caching = Caching(kind, cache_dtype, "gpu", "cached")
            yield own_system("cached", caching, model, cached_jobs(model, near), None, ahead, graphs)
        if "host" in study.tiers:
            far = move_to_host(near, host, model)
            for policy in study.policies:
                caching = Caching(kind, cache_dtype, "host", policy)
                planning = Planning(model, latency, policy)
                loading = (naive, None) if policy == "naive" else (ahead, graphs)
                yield own_system("cached", caching, model, cached_jobs(model, far), planning, *loading)


def warm_up(systems: Sequence[System], edits: Sequence[Edit]) -> None:
    """Run every system once; two steps are enough for one whose steps are all alike."""
    short = [replace(edit, steps=min(edit.steps, 2)) for edit in edits]
    for system in systems:
        system.run(edits if system.sees_masks else short)


def make_row(
    system: System, mask_ratio: float, batch: int, timings: list[Timing], steps: int, peak: float | None
) -> EditRow:
    denoise = statistics.median(timing.denoise for timing in timings)
    edit = statistics.median(timing.edit for timing in timings)
    caching = system.caching
    return EditRow(
        system=system.name,
        kind=caching.kind if caching else None,
        cache_dtype=caching.cache_dtype if caching else None,
        tier=caching.tier if caching else None,
        policy=caching.policy if caching else None,
        mask_ratio=round(mask_ratio, 3),
        batch=batch,
        step_ms=round(1000 * denoise / steps, 3),
        edit_ms=round(1000 * edit, 3),
        peak_gib=peak,
    )


def print_rows(rows: list[EditRow], machine: Machine, title: str) -> None:
    table = Table(title=title, caption=machine_text(machine))
    table.add_column("system", no_wrap=True)
    for heading in ("mask ratio", "batch", "step ms", "faster", "edit ms", "faster", "peak GiB"):
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
            f"{row.peak_gib:.1f}" if row.peak_gib else "",
            end_section=following is not None
            and (following.mask_ratio, following.batch) != (row.mask_ratio, row.batch),
        )
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)

"""A timeline of one step of cached jobs whose activations are loaded meanwhile, with every policy.

The first steps warm up. The last step but one is shown, so that both the loads ahead of it and the loads for the step
after it are visible. Times are events on the streams of a CUDA device, or readings of a clock on a CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder
from instgenie.bench.machine import describe_machine, machine_text
from instgenie.bench.ours import move_to_host
from instgenie.bench.samples import make_edits
from instgenie.bench.timed import StepMarks, StreamClock, TimedLoader
from instgenie.bench.timeline import Bar, Track, write_timelines
from instgenie.cache.host import HostTier
from instgenie.cost.latency import Latency, find_latency
from instgenie.cost.plan import Plan
from instgenie.engine.loading.lanes import RowChoice
from instgenie.engine.loop import Engine
from instgenie.engine.planning import Planning
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations, CacheDtype, Kind
from instgenie.machine.clock import now
from instgenie.machine.device import device_name
from instgenie.machine.device_memory import memory_guard
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.pictures.samples import sample_picture
from instgenie.telemetry.progress import Progress, show_status
from instgenie.types import PlanPolicy

STEPS = 5
SHOWN = STEPS - 2
HOST_BYTES = 2**50
MIN_WAIT = 0.02  # ms; shorter waits are the overhead of measuring


BITS: dict[CacheDtype, str] = {"fp8": "eight bits", "int4": "four bits"}


@dataclass(frozen=True)
class PipelineStudy:
    """The step to look at."""

    mask_ratio: float = 0.11
    batch: int = 1
    kind: Kind = "kv"
    cache_dtype: CacheDtype | None = None  # None: the model's own on CUDA, fp8 on a CPU, which loads nothing else
    rows: RowChoice = "auto"
    policies: tuple[PlanPolicy, ...] = ("naive", "cached", "greedy", "exact")


def bench_pipeline(
    name: str,
    device: str,
    size: tuple[int, int] | None,
    study: PipelineStudy,
    timeline: Path | None,
    trace: Path | None,
) -> None:
    for path in (timeline, trace):
        check_folder(path)
    with show_status("loading the model"):
        model = load(name, device)
    size = size or (model.own_size, model.own_size)
    cache_dtype = study.cache_dtype or ("model" if model.device.type == "cuda" else "fp8")
    latency = find_latency(device_name(model.device), name, model.device.type)
    with Progress(transient=True) as progress, memory_guard("a step"):
        task = progress.add("measuring", len(study.policies))
        host = HostTier(HOST_BYTES)
        near = register(sample_picture(size), model, size, STEPS, kind=study.kind, cache_dtype=cache_dtype)
        activations = move_to_host(near, host, model)
        del near
        tracks = []
        for policy in study.policies:
            tracks.append(measure(model, size, activations, latency, study, policy))
            task.advance()
    machine = describe_machine(model)
    title = f"One step of {name}, {size[1]}x{size[0]}, mask ratio {study.mask_ratio:g}, batch {study.batch}"
    kept = f"{study.kind}, kept in {BITS.get(cache_dtype, machine['dtype'])}"
    about = f"Activations ({kept}) are in main memory. {machine_text(machine)}"
    print_tracks(tracks, title, about)
    write_timelines(tracks, title, about, timeline, trace)


def measure(
    model: Model,
    size: tuple[int, int],
    activations: Activations,
    latency: Latency,
    study: PipelineStudy,
    policy: PlanPolicy,
) -> Track:
    edits = make_edits(model, size, STEPS, study.mask_ratio, study.batch)
    loader = TimedLoader(model, 1 if policy == "naive" else None, study.rows)
    for _ in range(2):  # the first run warms up
        loader.steps.clear()
        loader.filled.clear()
        engine = Engine(model, study.batch, Planning(model, latency, policy), loader)
        for edit in edits:
            engine.join(reuse(prepare(edit, model), activations))
        while engine.jobs:
            engine.step()
        now(model.device)  # wait for the device
    return make_track(policy, loader, activations)


def make_track(policy: str, loader: TimedLoader, activations: Activations) -> Track:
    step, clock = loader.steps[SHOWN], loader.clock
    step_ms = clock.between(step.start, step.end)
    places = PlaceNames(activations, step.plan)
    bars = list(compute_bars(step, clock, places))
    for filled in loader.filled:
        start, end = clock.between(step.start, filled.start), clock.between(step.start, filled.end)
        if filled.step == SHOWN:
            bars.append(Bar("load", "load", f"load of {places.name(filled.place)}", start, end))
        elif filled.step == SHOWN + 1 and start < step_ms:
            bars.append(Bar("load", "ahead", f"load of {places.name(filled.place)} for the next step", start, end))
    waiting = sum(bar.end - bar.start for bar in bars if bar.what == "wait")
    loading = sum(bar.end - bar.start for bar in bars if bar.what == "load")
    num_dense = sum(not cached for cached in step.plan)
    about = f"{step_ms:.1f} ms per step, of which {waiting:.1f} waiting; {loading:.1f} ms of loading"
    return Track(policy, f"{about}; {num_dense} of {len(step.plan)} blocks dense", step_ms, bars)


def compute_bars(step: StepMarks, clock: StreamClock, places: "PlaceNames") -> Iterator[Bar]:
    """Draw the computation between two reads, and every wait; the first bar precedes all reads."""
    asked = [clock.between(step.start, moment.asked) for moment in step.moments]
    there = [clock.between(step.start, moment.there) for moment in step.moments]
    read = [-1, *(moment.place for moment in step.moments), places.num_places]
    ends = [*asked, clock.between(step.start, step.end)]
    for place, following, start, end in zip(read, read[1:], [0.0, *there], ends, strict=False):
        yield places.bar(place, following, start, end)
    for place, start, end in zip(read[1:], asked, there, strict=False):
        if end - start > MIN_WAIT:
            yield Bar("compute", "wait", f"wait for {places.name(place)}", start, end)


class PlaceNames:
    """Names of the places that activations keep, and of the blocks computed between two of them."""

    def __init__(self, activations: Activations, plan: Plan) -> None:
        self.plan = plan
        self.blocks: list[int | None] = []  # per place; None: the output of a run of blocks
        has_behind = len(activations.rows) > activations.num_blocks
        block = 0
        for length in activations.run_lengths:
            self.blocks += [*range(block, block + length), *([None] if has_behind else [])]
            block += length

    @property
    def num_places(self) -> int:
        return len(self.blocks)

    def name(self, place: int) -> str:
        block = self.blocks[place]
        return f"output of block {self.blocks[place - 1]}" if block is None else f"block {block}"

    def bar(self, place: int, following: int, start: float, end: float) -> Bar:
        """Make the bar of the blocks from one place up to another; only the first of them can be cached."""
        blocks = [block for block in self.blocks[max(place, 0) : following] if block is not None]
        if not blocks:
            return Bar("compute", "outside", "no block", start, end)
        if self.plan[blocks[0]]:
            return Bar("compute", "cached", f"block {blocks[0]}, cached", start, end)
        several = f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
        return Bar("compute", "dense", f"{several}, dense", start, end)


def print_tracks(tracks: Sequence[Track], title: str, about: str) -> None:
    table = Table(title=title, caption=about)
    table.add_column("policy")
    for heading in ("step ms", "waiting ms", "loading ms", "dense ms"):
        table.add_column(heading, justify="right")
    for track in tracks:
        spent = [
            sum(bar.end - bar.start for bar in track.bars if bar.what == what) for what in ("wait", "load", "dense")
        ]
        table.add_row(track.name, f"{track.step_ms:.2f}", *(f"{ms:.2f}" for ms in spent))
    Console().print(table)

"""Figure 15: latency of a block and of a whole edit against mask ratio, beside diffusers and other systems."""

import statistics
from collections.abc import Callable, Iterator

import torch

from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Section, Table, ms, row, times
from instgenie.bench.systems import CACHED, COMPILED, DENSE, DIFFUSERS, NAMES, SEES_MASKS, make_system, suiting
from instgenie.bench.timing import System, measure
from instgenie.engine.prepare import prepare
from instgenie.engine.register import reuse
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.models.flux.model import as_flux, is_flux
from instgenie.models.joint.batch import pack
from instgenie.models.joint.block import DoubleBlock, JointBlock
from instgenie.models.joint.flow import Apart, Together
from instgenie.models.joint.modulation import Modulation
from instgenie.models.joint.network import recall
from instgenie.models.joint.residual import Residual

NAME = "fig15"
NUM_RUNS = 8  # per block


def run(lab: Lab) -> Section:
    blocks = list(measure_blocks(lab)) if is_flux(lab.model) else []
    pictures = measure_pictures(lab)
    tables = [picture_table(pictures, lab)]
    charts = [picture_chart(pictures, lab)]
    if blocks:
        tables.insert(0, block_table(blocks))
        charts.insert(0, block_chart(blocks))
    ratio = lab.scale.mask_ratios[0]
    return Section(
        name=NAME,
        title="Latency against mask ratio",
        paper="The time of a block's kernels and of a whole picture grows with the masked share.",
        here=f"Single blocks, then whole edits of {lab.scale.steps} steps up to the final latents, one at a time, in "
        "the default quality (balanced: the first steps compute every token). Systems that ignore masks are measured "
        "once.",
        tables=tables,
        charts=charts,
        findings=[
            f"At mask ratio {ratio:g} an edit is {1 / pictures[CACHED, ratio] * pictures[DIFFUSERS, 0.0]:.2f} times as "
            "fast as through diffusers."
        ],
    )


def measure_blocks(lab: Lab) -> Iterator[tuple[str, float, float, float]]:
    """Yield the kind of block, the mask ratio, and the seconds cached and dense."""
    blocks = as_flux(lab.model).joint_network.blocks
    kinds: dict[str, tuple[JointBlock, int]] = {
        "double" if isinstance(block, DoubleBlock) else "single": (block, index) for index, block in enumerate(blocks)
    }  # the last of each kind
    for ratio in lab.scale.mask_ratios:
        lab.tell(f"blocks at mask ratio {ratio:g}")
        dense = prepare(lab.edit(ratio), lab.model)
        cached = reuse(dense, lab.activations)
        cached.step = cached.edit.dense_steps
        for kind, (block, index) in kinds.items():
            yield kind, ratio, time_block(lab, block, index, cached), time_block(lab, block, index, dense)


@torch.inference_mode()
def time_block(lab: Lab, block: JointBlock, index: int, job: Job) -> float:
    batch = pack([job])
    network = as_flux(lab.model).joint_network
    layout, mod = batch.layout, Modulation(network.embed_time(batch))
    width = batch.text.shape[1]
    image = torch.randn(sum(layout.num_image), width, dtype=batch.text.dtype, device=job.device)
    joint = layout.join(batch.text, image)

    def call() -> object:
        heads = recall(network, index, batch, layout)
        is_double = isinstance(block, DoubleBlock)
        flow = Apart(Residual(batch.text), Residual(image)) if is_double else Together(Residual(joint))
        return block(flow, mod, layout, heads)

    return timed(call, lab.model.device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a few calls after a warm-up."""
    call()
    seconds = []
    for _ in range(NUM_RUNS):
        start = now(device)
        call()
        seconds.append(now(device) - start)
    return statistics.median(seconds)


def measure_pictures(lab: Lab) -> dict[tuple[str, float], float]:
    """Return the seconds of an edit by system and mask ratio; 0 stands for any ratio."""
    names = [name for name in suiting(NAMES, lab.model) if name != COMPILED or lab.scale.compiled]
    tuning = [lab.edit(lab.scale.mask_ratios[0])]
    lab.tell("making the systems")
    systems = [make_system(name, lab.model, lab.activations, tuning) for name in names]
    seconds = {}
    for place, ratio in enumerate(lab.scale.mask_ratios):
        edits = [lab.edit(ratio)]
        chosen = [system for system in systems if not place or system.name in SEES_MASKS]
        lab.tell(f"edits at mask ratio {ratio:g}: {len(chosen)} systems")
        for system in chosen:
            if is_cold(system, lab, is_first=not place):
                system.run(edits)
        for system, timings in measure(chosen, edits, lab.scale.repeats, lambda: None).items():
            at = ratio if system.name in SEES_MASKS else 0.0
            seconds[system.name, at] = statistics.median(timing.edit for timing in timings)
    return seconds


def is_cold(system: System, lab: Lab, is_first: bool) -> bool:
    """True if the system has to run once before it is timed: on a CUDA device every system at every ratio, because
    each shape is captured; on a CPU only diffusers and the cached system, at the first ratio."""
    return lab.model.device.type == "cuda" or (is_first and system.name in (DIFFUSERS, CACHED))


def block_table(blocks: list[tuple[str, float, float, float]]) -> Table:
    rows = [
        row(NAME, f"{kind} block", f"{ratio:g}", ms(cached), ms(dense), times(dense / cached), key=(kind, ratio))
        for kind, ratio, cached, dense in blocks
    ]
    return Table("One block", ("block", "mask ratio", "cached ms", "dense ms", "faster"), rows)


def block_chart(blocks: list[tuple[str, float, float, float]]) -> Chart:
    series = []
    for kind in dict.fromkeys(kind for kind, *_ in blocks):
        own = [(ratio, cached, dense) for name, ratio, cached, dense in blocks if name == kind]
        series.append(Series(f"{kind}, cached", [(ratio, 1000 * cached) for ratio, cached, _ in own]))
        series.append(Series(f"{kind}, dense", [(ratio, 1000 * dense) for ratio, _, dense in own]))
    most = [y for one in series for _, y in one.points]
    ratios = [ratio for _, ratio, *_ in blocks]
    return Chart("One block", at_values("mask ratio", ratios), linear("ms", most), series)


def picture_table(seconds: dict[tuple[str, float], float], lab: Lab) -> Table:
    base = seconds[DIFFUSERS, 0.0]
    rows = [
        row(
            NAME,
            name,
            f"{ratio:g}" if ratio else "any",
            ms(spent),
            times(base / spent),
            key=("edit", name, ratio or "any"),
        )
        for (name, ratio), spent in sorted(seconds.items(), key=lambda item: (NAMES.index(item[0][0]), item[0][1]))
    ]
    title = f"One edit, {lab.model.own_size}×{lab.model.own_size}, {lab.scale.steps} steps"
    return Table(title, ("system", "mask ratio", "ms", "faster than diffusers"), rows)


def picture_chart(seconds: dict[tuple[str, float], float], lab: Lab) -> Chart:
    ratios = lab.scale.mask_ratios
    series = []
    for name in dict.fromkeys(name for name, _ in seconds):
        points = [(ratio, seconds.get((name, ratio), seconds.get((name, 0.0), 0.0))) for ratio in ratios]
        series.append(Series(name, points))
    series.sort(key=lambda one: one.name not in (CACHED, DENSE))
    most = [y for one in series for _, y in one.points]
    return Chart("One edit", at_values("mask ratio", ratios), linear("seconds", most), series)

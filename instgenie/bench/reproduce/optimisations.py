"""SwiftDiffusion's figure on what makes a network faster, one change after the other, from diffusers as it is."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from instgenie.bench.ours import cold_jobs, dense_jobs, own_system
from instgenie.bench.plots import Chart, Series
from instgenie.bench.reproduce.axes import at_values, linear
from instgenie.bench.reproduce.lab import Lab
from instgenie.bench.reproduce.section import Row, Section, Table, ms, row, times
from instgenie.bench.stock import compiled_system, stock_system
from instgenie.bench.systems import within
from instgenie.bench.timing import System
from instgenie.engine.graphs import make_graphs
from instgenie.kernels.switch import kernels

NAME = "optimisations"
RATIO = 0.2
NUM_WARM_UPS = 2  # a pass is captured when it is seen for the second time


def changes(lab: Lab) -> Iterator[System]:
    """Systems, each with one change more than the one before; those of diffusers come first. A device has those that it
    can have."""
    model, on_cuda = lab.model, lab.model.device.type == "cuda"
    yield stock_system(model)
    if on_cuda and model.is_convolutional:
        yield replace(stock_system(model, model.network), name="diffusers, channels last")
    if lab.scale.compiled:
        yield replace(compiled_system(model), name="diffusers, compiled")
    dense = own_system("our passes", None, model, dense_jobs(model))
    yield within(dense.name, dense, partial(kernels, False))
    if on_cuda:
        yield replace(dense, name="with fused kernels")
    graphs = make_graphs(model)
    if graphs:
        yield own_system("with CUDA graphs", None, model, dense_jobs(model), graphs=graphs)
    yield own_system("masked tokens alone", None, model, cold_jobs(model, "balanced"), graphs=graphs)


def run(lab: Lab) -> Section:
    batches = (1, lab.scale.batches[-1])
    edit = lab.edit(RATIO)
    found: dict[str, list[float]] = {}  # seconds per step, for each batch
    for system in changes(lab):
        lab.tell(system.name)
        for num in batches:
            for _ in range(NUM_WARM_UPS if lab.model.device.type == "cuda" else 0):
                system.run([edit] * num)
            seconds = min(system.run([edit] * num).denoise for _ in range(max(lab.scale.repeats, 1)))
            found.setdefault(system.name, []).append(seconds / edit.steps)
    first, last = next(iter(found.values())), list(found.values())[-1]
    return Section(
        name=NAME,
        title="What makes the network faster, one change after the other",
        paper="SwiftDiffusion: CUDA graphs, fused kernels and another order of memory make the UNet itself faster.",
        here=f"One edit and a batch of {batches[-1]}, {edit.steps} steps, without adapters, up to the final latents. "
        "Each row of ours has one change more than the row before. Fused kernels, CUDA graphs and another order of "
        "memory are for GPUs; on a CPU there are fewer rows. The last row computes the tokens of a mask of "
        f"{RATIO:.0%} alone, and all tokens in the steps that it reuses.",
        tables=[
            Table(
                "Milliseconds per step",
                ("network", *(part for num in batches for part in (f"batch of {num}", "times as fast"))),
                [change_row(name, own, first) for name, own in found.items()],
            )
        ],
        charts=[chart(found)],
        findings=[
            f"All changes together make a step {times(first[0] / last[0])} as fast for one edit and "
            f"{times(first[1] / last[1])} for a batch of {batches[-1]}."
        ],
    )


def change_row(name: str, own: list[float], first: list[float]) -> Row:
    cells = [(ms(seconds), times(before / seconds)) for seconds, before in zip(own, first, strict=True)]
    return row(NAME, name, *(cell for pair in cells for cell in pair))


def chart(found: dict[str, list[float]]) -> Chart:
    """One edit; changes are counted along the axis."""
    points = [(float(number), 1000 * own[0]) for number, own in enumerate(found.values())]
    series = Series("one edit", points, labels=list(found))
    return Chart(
        "One change after the other",
        at_values("changes", [number for number, _ in points]),
        linear("ms per step", [height for _, height in points]),
        [series],
    )

"""Plots and the sheet of example edits for the quality report. Draws figures; runs nothing."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from instgenie.bench.figures import (
    BOX_BAR,
    JUMP_BAR,
    RATIOS,
    Figures,
    bar_ratios,
    kept_methods,
    mean,
    share,
    shown_methods,
)
from instgenie.bench.plots import Axis, Chart, Series, Strips
from instgenie.bench.variants import DENSE, NAIVE, SKIPPING, SMALL_CROP, Outcome, Sample
from instgenie.pictures.resizing import resize_picture
from instgenie.pictures.sheet import INK, PALE_INK, PAPER, shorten, tinted
from instgenie.types import Pixels


def fidelity_chart(figures: Figures) -> Chart:
    """Draw the distance from the dense edit against cost. Each line turns one knob up."""
    ratios = bar_ratios(figures)

    def point(name: str) -> tuple[float, float]:
        loss = 1 - mean(figures.values(name, "ssim_box", ratios))
        return mean(figures.values(name, "cost", ratios)), loss

    def series(about: str, names: Sequence[str], labels: Sequence[str], line: bool = True) -> Series:
        there = [(name, label) for name, label in zip(names, labels, strict=True) if name in figures.methods]
        shape = "dot" if line else "cross"
        return Series(about, [point(name) for name, _ in there], [label for _, label in there], line, shape)

    def knob(unit: str, numbers: Sequence[int]) -> list[str]:
        return ["kv", *(f"kv, {number} {unit}{'' if number == 1 else 's'}" for number in numbers)]

    drawn = [
        series("leading dense steps", knob("dense step", (1, 2, 4, 8)), ["", "1", "2", "4", "8"]),
        series("leading dense blocks", knob("dense block", (1, 2, 4)), ["", "1", "2", "4"]),
        series("halo", ["kv", "kv, halo 1", "kv, halo 2"], ["", "1", "2"]),
        series("halo, one dense step", [f"kv, 1 dense step{h}" for h in ("", ", halo 1", ", halo 2")], ["", "1", "2"]),
        series("registered with caption", ["kv, caption", "kv, caption, 1 dense step"], ["", ""]),
        series("registered isolated", ["kv, isolated", "kv, isolated, 1 dense step"], ["", ""]),
        series("naive", [NAIVE], [""], line=False),
        series("step skipping", [SKIPPING], [""], line=False),
        series("crop, equal cost", [SMALL_CROP], [""], line=False),
    ]
    ticks = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    return Chart(
        "Fidelity against cost",
        Axis("operations, as a share of dense", (0, 0.2, 0.4, 0.6, 0.8, 1), 0, 1),
        Axis("1 − SSIM in the mask's box (lower is closer)", ticks, 0.0005, 0.6, log=True),
        drawn,
        rules=[(1 - BOX_BAR, f"SSIM {BOX_BAR}")],
    )


def ratio_chart(figures: Figures) -> Chart:
    ratios = [ratio for ratio in RATIOS if figures.rows([ratio])]
    short = {name: text.split(":")[0] for name, text in shown_methods(figures).items()}
    series = [
        Series(
            name if name.startswith(("kv", "y")) else short[name].replace("and stitch, ", ""),
            [(ratio, mean(figures.values(name, "ssim_box", [ratio]))) for ratio in ratios],
        )
        for name in short
        if name != DENSE
    ]
    low = min((y for line in series for _, y in line.points), default=0.0)
    floor = math.floor(low * 10) / 10
    ticks = [round(floor + 0.1 * i, 1) for i in range(round((1 - floor) * 10) + 1)]
    return Chart(
        "Fidelity by mask ratio",
        Axis("share of the tokens that is masked", ratios, 0, 0.55, form="{:g}"),
        Axis("SSIM in the mask's box", ticks, floor, 1, form="{:.1f}"),
        series,
        rules=[(BOX_BAR, f"{BOX_BAR}")],
    )


def jump_strips(figures: Figures) -> Strips:
    ratios = bar_ratios(figures)
    rows = []
    for name, about in shown_methods(figures).items():
        if name != DENSE:
            jumps = figures.jumps(name, ratios)
            above = f"{share([jump > JUMP_BAR for jump in jumps]):.0%} above"
            short = about.split(":")[0].replace("cached ", "").replace("and stitch, ", "").replace("`", "")
            rows.append((short.removesuffix(" (balanced)").removesuffix(" (fast)"), jumps, above))
    ticks = (0.5, 0.7, 1, 1.4, 2, 2.8)
    axis = Axis("jump across the mask's border, as a multiple of the dense edit's", ticks, 0.45, 3, log=True)
    return Strips("Seams, picture by picture", axis, rows, (JUMP_BAR, f"{JUMP_BAR}"))


def bytes_chart(figures: Figures) -> Chart:
    """Draw the distance from the dense edit against the bytes of a template. Each line has one format and keeps fewer
    and fewer steps."""
    ratios = bar_ratios(figures)

    def point(name: str) -> tuple[float, float]:
        loss = 1 - mean(figures.values(name, "ssim_box", ratios))
        return mean(figures.values(name, "bytes", ratios)) / 1e6, max(loss, LEAST_LOSS)

    names = kept_methods(figures)
    by_format: dict[str, list[str]] = {}
    for name in names:
        form = next((f for f in ("fp8", "int4") if f in name), "model")
        by_format.setdefault(f"{form}, padding read" if "padding read" in name else form, []).append(name)
    drawn = [
        Series(f"kept in {form}", [point(name) for name in some], [stride_label(name) for name in some])
        for form, some in by_format.items()
    ]
    sizes = [x for line in drawn for x, _ in line.points] or [1.0]
    powers = range(math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes))) + 1)
    return Chart(
        "Fidelity against bytes",
        Axis("MB of a template", [10.0**power for power in powers], 10.0 ** powers[0], 10.0 ** powers[-1], log=True),
        Axis("1 − SSIM in the mask's box (lower is closer)", (0.001, 0.003, 0.01, 0.03, 0.1), 0.0005, 0.2, log=True),
        drawn,
    )


def stride_label(name: str) -> str:
    return next((part.removesuffix(" steps") for part in name.split(", ") if part.startswith("every")), "every step")


PLOTS: dict[str, Callable[[Figures], Chart | Strips]] = {
    "quality-cost.svg": fidelity_chart,
    "quality-ratio.svg": ratio_chart,
    "quality-jump.svg": jump_strips,
    "quality-bytes.svg": bytes_chart,
}
GRID = "quality-grid.png"
LEAST_LOSS = 0.0005  # the lowest point of the plot
CELL, GAP, MARGIN, LINE = 256, 16, 32, 20
TEXT = ImageFont.load_default(15)


def draw_grid(shown: Sequence[tuple[Sample, list[Outcome]]], figures: Figures) -> Pixels:
    """Draw one row per example: mask, dense, and every other method beside it."""
    order = [DENSE, figures.qualities["balanced"], figures.qualities["fast"], NAIVE, SKIPPING, SMALL_CROP]
    order += [outcome.name for outcome in shown[0][1]]
    columns = [name for name in dict.fromkeys(order) if name in {outcome.name for outcome in shown[0][1]}]
    top = MARGIN + LINE + 8
    width = 2 * MARGIN + (len(columns) + 1) * (CELL + GAP) - GAP
    sheet = Image.new("RGB", (width, top + len(shown) * (CELL + GAP + LINE + 6) - GAP + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    titles = {DENSE: "dense", SMALL_CROP: "crop and stitch, equal cost", SKIPPING: "step skipping, equal cost"}
    titles |= {name: f"{quality} ({name})" for quality, name in figures.qualities.items() if name != DENSE}
    for index, title in enumerate(["mask", *(titles.get(name, name) for name in columns)]):
        draw.text((MARGIN + index * (CELL + GAP), MARGIN), shorten(title, CELL, TEXT), INK, TEXT)
    for row, (sample, outcomes) in enumerate(shown):
        by_name = {outcome.name: outcome for outcome in outcomes}
        pictures = [tinted(sample.edit.picture, sample.edit.mask), *(by_name[name].pictures[0] for name in columns)]
        costs = [sample.edit.prompt, *(f"operations {by_name[name].costs[0]:.2f}" for name in columns)]
        y = top + row * (CELL + GAP + LINE + 6)
        for column, (picture, words) in enumerate(zip(pictures, costs, strict=True)):
            x = MARGIN + column * (CELL + GAP)
            sheet.paste(Image.fromarray(resize_picture(picture, (CELL, CELL))), (x, y))
            draw.text((x, y + CELL + 5), shorten(words, CELL, TEXT), PALE_INK, TEXT)
    return np.array(sheet)

"""The quality report: tables in Markdown, written with plots and example edits, and a summary on the screen.

The report replaces the part between two marks of quality.md in a folder and leaves the text around it alone.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from instgenie.bench.charts import GRID, PLOTS, draw_grid
from instgenie.bench.figures import (
    JUMP_BAR,
    RATIOS,
    Figures,
    bar_ratios,
    bars,
    kept_methods,
    knob_methods,
    mean,
    share,
    shown_methods,
)
from instgenie.bench.markdown import markdown_table, put_between
from instgenie.bench.variants import Outcome, Sample
from instgenie.pictures.picture import save_picture

START, END = "<!-- run -->", "<!-- end of run -->"
NONE = "–"

FigureColumn = tuple[str, Callable[[Figures, str, Sequence[float]], str]]


def number(form: str, value: float) -> str:
    return NONE if math.isnan(value) else form.format(value)


def mean_of(figure: str, form: str) -> Callable[[Figures, str, Sequence[float]], str]:
    return lambda figures, name, ratios: number(form, mean(figures.values(name, figure, ratios)))


def jump_text(figures: Figures, name: str, ratios: Sequence[float]) -> str:
    jumps = figures.jumps(name, ratios)
    return number("{:.2f}", float(np.quantile(jumps, 0.95)) if jumps else math.nan)


def seam_text(figures: Figures, name: str, ratios: Sequence[float]) -> str:
    return number("{:.0%}", share([jump > JUMP_BAR for jump in figures.jumps(name, ratios)]))


def kid_text(figures: Figures, name: str, ratios: Sequence[float]) -> str:
    sets = figures.methods[name].sets
    return f"{sets['kid'] * 1000:.1f} ± {sets['kid_spread'] * 1000:.1f}" if sets else NONE


COSTS: list[FigureColumn] = [
    ("operations", mean_of("cost", "{:.2f}")),
    ("time", lambda figures, name, ratios: number("{:.2f}", figures.time(name, ratios))),
]
BYTES: list[FigureColumn] = [
    ("MB a template", lambda figures, name, ratios: number("{:.1f}", mean(figures.values(name, "bytes", ratios)) / 1e6))
]
CLOSENESS: list[FigureColumn] = [
    ("SSIM in the box", mean_of("ssim_box", "{:.4f}")),
    ("SSIM", mean_of("ssim", "{:.4f}")),
    ("LPIPS in the box", mean_of("lpips_box", "{:.4f}")),
    ("LPIPS", mean_of("lpips", "{:.4f}")),
    ("PSNR in the box", mean_of("psnr_box", "{:.1f}")),
    ("PSNR", mean_of("psnr", "{:.1f}")),
]
BORDER: list[FigureColumn] = [("jump, 95th of 100", jump_text), ("new seams", seam_text)]
SETS: list[FigureColumn] = [("KID × 1000", kid_text), ("probe", mean_of("right", "{:.3f}"))]


def table(figures: Figures, names: dict[str, str], columns: Sequence[FigureColumn], ratios: Sequence[float]) -> str:
    """Make a table with one row per method, under the name it is shown by."""
    lines = [["method", *(heading for heading, _ in columns)]]
    lines += [
        [shown, *(fill(figures, name, ratios) for _, fill in columns)]
        for name, shown in names.items()
        if name in figures.methods
    ]
    return markdown_table(lines)


def bar_table(figures: Figures) -> str:
    rows = [[name, bar, found, "yes" if met else "**no**"] for name, bar, found, met in bars(figures)]
    return markdown_table([["balanced", "bar", "measured", "met"], *rows])


def ratio_table(figures: Figures) -> str:
    name = figures.qualities["balanced"]
    columns = [*COSTS, *CLOSENESS, *BORDER]
    lines = [["mask ratio", "pictures", *(heading for heading, _ in columns)]]
    lines += [
        [f"{ratio:g}", str(len(figures.rows([ratio]))), *(fill(figures, name, [ratio]) for _, fill in columns)]
        for ratio in RATIOS
        if figures.rows([ratio])
    ]
    return markdown_table(lines)


def report(figures: Figures, has_grid: bool) -> str:
    run, ratios = figures.run, bar_ratios(figures)
    about = ", ".join(f"{name} {value}" for name, value in run.items())
    real = (
        f" The probe is fitted on {figures.ceiling['train']:.0f} photographs; it labels {figures.ceiling['probe']:.3f} "
        "of the real photographs correctly whose edits asked for their own captions."
        if figures.ceiling
        else ""
    )
    parts = [
        f"`instgenie bench quality`: {about}.\n",
        "### What is promised\n",
        bar_table(figures),
        f"### Methods, mask ratios {ratios[0]:g} to {ratios[-1]:g}\n",
        table(figures, shown_methods(figures), [*COSTS, *CLOSENESS, *BORDER, *SETS], ratios),
        "*operations* and *time* of the steps are shares of the dense edit's. *new seams*: pictures whose jump across "
        f"the mask's border is more than {JUMP_BAR} times the dense edit's. KID-EffLite0 and the probe see only the "
        f"mask's box.{real}\n",
        "![SSIM by mask ratio](quality-ratio.svg)\n",
        "![Jump across the border of every picture](quality-jump.svg)\n",
        "### `balanced` by mask ratio\n",
        ratio_table(figures),
        "### What each knob does\n",
        table(figures, knob_methods(figures), [*COSTS, *CLOSENESS[:3], *BORDER, *SETS], ratios),
        "![Fidelity against cost](quality-cost.svg)\n",
        "### Fewer steps, fewer bits\n",
        table(figures, kept_methods(figures), [*BYTES, *COSTS[1:], *CLOSENESS[:3], *BORDER, *SETS], ratios),
        "![Fidelity against bytes](quality-bytes.svg)\n",
    ]
    grid = f"### Examples\n\n![Edits of the examples by each method]({GRID})\n"
    return "\n".join([*parts, grid] if has_grid else parts)


def write_report(figures: Figures, shown: Sequence[tuple[Sample, list[Outcome]]], folder: Path) -> None:
    for name, draw in PLOTS.items():
        (folder / name).write_text(draw(figures).svg(), encoding="utf-8")
    if shown:
        save_picture(draw_grid(shown, figures), folder / GRID)
    path = folder / "quality.md"
    before = path.read_text(encoding="utf-8") if path.exists() else f"# Quality\n\n{START}\n{END}\n"
    path.write_text(put_between(before, report(figures, bool(shown)), START, END), encoding="utf-8")


def print_report(figures: Figures) -> None:
    ratios = bar_ratios(figures)
    columns = [*BYTES, *COSTS, *CLOSENESS[:2], *BORDER[1:], *SETS]
    shown = Table(
        title=f"mask ratios {ratios[0]:g} to {ratios[-1]:g}", caption=", ".join(map(str, figures.run.values()))
    )
    shown.add_column("method")
    for heading, _ in columns:
        shown.add_column(heading, justify="right", min_width=6)
    for name in figures.methods:
        shown.add_row(name, *(fill(figures, name, ratios) for _, fill in columns))
    console = Console()
    console.print(shown)
    for name, bar, found, met in bars(figures):
        console.print(f"{'met ' if met else 'MISSED'}  {name}: {found} (bar {bar})", highlight=False)

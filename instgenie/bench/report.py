"""Figures of the quality study as tables, plots and a sheet of pictures. Knows numbers and names; runs nothing.

The report is written between two marks of quality.md in a folder, so that the text around it stays what it is.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from instgenie.bench.judge import Scores
from instgenie.bench.plots import Axis, Chart, Series, Strips
from instgenie.bench.variants import DENSE, NAIVE, SKIPPING, SMALL_CROP, Outcome, Sample
from instgenie.cli.demo import CELL, GAP, INK, LINE, MARGIN, PALE_INK, PAPER, TEXT, fit, shorten, tinted
from instgenie.pictures.picture import save_picture
from instgenie.types import Pixels

RATIOS = (0.05, 0.11, 0.2, 0.35, 0.5)
MAX_BAR_RATIO = 0.35  # what is promised is promised up to here
BOX_BAR, PICTURE_BAR, JUMP_BAR, JUMP_SHARE_BAR = 0.95, 0.985, 1.15, 0.95
NOISE = 2.0  # standard errors
START, END = "<!-- run -->", "<!-- end of run -->"
NONE = "–"


@dataclass(frozen=True)
class Picture:
    mask_kind: str
    ratio: float
    masked: float  # share of the tokens


@dataclass(frozen=True)
class Method:
    scores: Scores
    step_ms: dict[float, float]  # by ratio
    sets: dict[str, float]  # KID of all its pictures


@dataclass(frozen=True)
class Figures:
    run: dict[str, str | int]
    pictures: list[Picture]
    methods: dict[str, Method]
    qualities: dict[str, str]  # the name of the method that each is
    ceiling: dict[str, float]  # of the probe, on real photographs

    def as_json(self) -> dict[str, Any]:
        """Every figure of every picture, to five digits."""
        figures: dict[str, Any] = rounded(asdict(self))
        return figures

    def rows(self, ratios: Iterable[float]) -> list[int]:
        chosen = set(ratios)
        return [row for row, picture in enumerate(self.pictures) if picture.ratio in chosen]

    def values(self, name: str, figure: str, ratios: Iterable[float]) -> list[float]:
        """Of one method, a figure of every picture of some ratios; pictures without a border have no jump."""
        scores = self.methods[name].scores.get(figure, [])
        found = [scores[row] for row in self.rows(ratios)] if scores else []
        return [value for value in found if not math.isnan(value)]

    def jumps(self, name: str, ratios: Iterable[float]) -> list[float]:
        """The jump across the border, as a multiple of the dense edit's."""
        own, dense = (self.methods[which].scores["jump"] for which in (name, DENSE))
        pairs = [(own[row], dense[row]) for row in self.rows(ratios)]
        return [jump / base for jump, base in pairs if base > 0 and not math.isnan(jump)]

    def time(self, name: str, ratios: Iterable[float]) -> float:
        """Of a step, as a share of the dense edit's in the same run."""
        own, dense = self.methods[name].step_ms, self.methods[DENSE].step_ms
        return mean([own[ratio] / dense[ratio] for ratio in ratios if ratio in own])


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else math.nan


def bar_ratios(figures: Figures) -> list[float]:
    return [r for r in RATIOS if r <= MAX_BAR_RATIO and figures.rows([r])]


# Tables

Column = tuple[str, Callable[[Figures, str, Sequence[float]], str]]


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


COSTS: list[Column] = [
    ("operations", mean_of("cost", "{:.2f}")),
    ("time", lambda figures, name, ratios: number("{:.2f}", figures.time(name, ratios))),
]
CLOSENESS: list[Column] = [
    ("SSIM in the box", mean_of("ssim_box", "{:.4f}")),
    ("SSIM", mean_of("ssim", "{:.4f}")),
    ("LPIPS in the box", mean_of("lpips_box", "{:.4f}")),
    ("LPIPS", mean_of("lpips", "{:.4f}")),
    ("PSNR in the box", mean_of("psnr_box", "{:.1f}")),
    ("PSNR", mean_of("psnr", "{:.1f}")),
]
BORDER: list[Column] = [("jump, 95th of 100", jump_text), ("new seams", seam_text)]
SETS: list[Column] = [("KID × 1000", kid_text), ("probe", mean_of("right", "{:.3f}"))]


def table(figures: Figures, names: dict[str, str], columns: Sequence[Column], ratios: Sequence[float]) -> str:
    """A row for each method, under the name it is shown by."""
    lines = [["method", *(heading for heading, _ in columns)]]
    lines += [
        [shown, *(fill(figures, name, ratios) for _, fill in columns)]
        for name, shown in names.items()
        if name in figures.methods
    ]
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body)) + "\n"


def shown_methods(figures: Figures) -> dict[str, str]:
    """The methods that compete, by the names they are shown under."""
    fast, balanced = figures.qualities["fast"], figures.qualities["balanced"]
    cached_y = "y" + balanced.removeprefix("kv")
    shown = {
        DENSE: "dense (`exact`)",
        balanced: f"cached {balanced} (`balanced`)",
        fast: f"cached {fast} (`fast`)",
        cached_y: f"cached {cached_y}",
        NAIVE: "naive: unmasked tokens dropped",
        SKIPPING: "step skipping, equal cost",
        SMALL_CROP: "crop and stitch, margin 32, equal cost",
        "crop, margin 32": "crop and stitch, margin 32",
        "crop, margin 128": "crop and stitch, margin 128",
    }
    return {name: text for name, text in shown.items() if name in figures.methods}


def knob_methods(figures: Figures) -> dict[str, str]:
    """Every way of reuse with kv."""
    return {name: name for name in figures.methods if name.split(",")[0] == "kv"}


# Bars


def bars(figures: Figures) -> list[tuple[str, str, str, bool]]:
    """What is promised of the balanced quality: the bar, what it asks, what was measured, whether that is enough."""
    name, ratios = figures.qualities["balanced"], bar_ratios(figures)
    boxes = [mean(figures.values(name, "ssim_box", [ratio])) for ratio in ratios]
    wholes = [mean(figures.values(name, "ssim", [ratio])) for ratio in ratios]
    quiet = share([jump <= JUMP_BAR for jump in figures.jumps(name, ratios)])
    found = [
        ("SSIM in the box, worst ratio", f"≥ {BOX_BAR}", f"{min(boxes):.4f}", min(boxes) >= BOX_BAR),
        ("SSIM, worst ratio", f"≥ {PICTURE_BAR}", f"{min(wholes):.4f}", min(wholes) >= PICTURE_BAR),
        (
            f"pictures whose jump is at most {JUMP_BAR} of dense",
            f"≥ {JUMP_SHARE_BAR:.0%}",
            f"{quiet:.1%}",
            quiet >= JUMP_SHARE_BAR,
        ),
    ]
    if figures.ceiling:
        found += [against(figures, name, DENSE, "no worse than dense")]
        rivals = {SKIPPING: "better than step skipping", SMALL_CROP: "better than crop and stitch, equal cost"}
        found += [against(figures, name, rival, about) for rival, about in rivals.items()]
    return found


def against(figures: Figures, name: str, rival: str, about: str) -> tuple[str, str, str, bool]:
    """KID and probe of two methods over the same pictures. Better is better in the mean; no worse is within noise."""
    own, other = figures.methods[name], figures.methods[rival]
    kid_gap = own.sets["kid"] - other.sets["kid"]
    rows = figures.rows(bar_ratios(figures))
    gaps = [own.scores["right"][row] - other.scores["right"][row] for row in rows]
    probe_gap = mean(gaps)
    noise = statistics.pstdev(gaps) / math.sqrt(len(gaps))
    slack = 0.0 if rival != DENSE else 1.0
    enough = kid_gap <= slack * NOISE * other.sets["kid_spread"] and probe_gap >= -slack * NOISE * noise
    measured = f"KID × 1000 {1000 * kid_gap:+.1f}, probe {probe_gap:+.3f} ± {noise:.3f}"
    return about, "KID lower, probe higher" if rival != DENSE else "within noise", measured, enough


def bar_table(figures: Figures) -> str:
    rows = [[name, bar, found, "yes" if met else "**no**"] for name, bar, found, met in bars(figures)]
    return markdown([["balanced", "bar", "measured", "met"], *rows])


def ratio_table(figures: Figures) -> str:
    name = figures.qualities["balanced"]
    columns = [*COSTS, *CLOSENESS, *BORDER]
    lines = [["mask ratio", "pictures", *(heading for heading, _ in columns)]]
    lines += [
        [f"{ratio:g}", str(len(figures.rows([ratio]))), *(fill(figures, name, [ratio]) for _, fill in columns)]
        for ratio in RATIOS
        if figures.rows([ratio])
    ]
    return markdown(lines)


# Plots


def fidelity_chart(figures: Figures) -> Chart:
    """How far from dense, against what it costs. Lines are one knob turned up."""
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


PLOTS: dict[str, Callable[[Figures], Chart | Strips]] = {
    "quality-cost.svg": fidelity_chart,
    "quality-ratio.svg": ratio_chart,
    "quality-jump.svg": jump_strips,
}
GRID = "quality-grid.png"


# The sheet


def draw_grid(shown: Sequence[tuple[Sample, list[Outcome]]], figures: Figures) -> Pixels:
    """A row for each example: mask, dense, and every other method beside it."""
    order = [DENSE, figures.qualities["balanced"], figures.qualities["fast"], NAIVE, SKIPPING, SMALL_CROP]
    columns = [name for name in dict.fromkeys(order) if name in {outcome.name for outcome in shown[0][1]}]
    top = MARGIN + LINE + 8
    width = 2 * MARGIN + (len(columns) + 1) * (CELL + GAP) - GAP
    sheet = Image.new("RGB", (width, top + len(shown) * (CELL + GAP + LINE + 6) - GAP + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    titles = {DENSE: "dense", SMALL_CROP: "crop and stitch, equal cost", SKIPPING: "step skipping, equal cost"}
    titles |= {name: f"{quality} ({name})" for quality, name in figures.qualities.items() if name != DENSE}
    for index, title in enumerate(["mask", *(titles.get(name, name) for name in columns)]):
        draw.text((MARGIN + index * (CELL + GAP), MARGIN), shorten(title), INK, TEXT)
    for row, (sample, outcomes) in enumerate(shown):
        by_name = {outcome.name: outcome for outcome in outcomes}
        pictures = [tinted(sample.edit.picture, sample.edit.mask), *(by_name[name].pictures[0] for name in columns)]
        costs = [sample.edit.prompt, *(f"operations {by_name[name].costs[0]:.2f}" for name in columns)]
        y = top + row * (CELL + GAP + LINE + 6)
        for column, (picture, words) in enumerate(zip(pictures, costs, strict=True)):
            x = MARGIN + column * (CELL + GAP)
            sheet.paste(fit(picture), (x, y))
            draw.text((x, y + CELL + 5), shorten(words), PALE_INK, TEXT)
    return np.array(sheet)


# The report


def report(figures: Figures, has_grid: bool) -> str:
    run, ratios = figures.run, bar_ratios(figures)
    about = ", ".join(f"{name} {value}" for name, value in run.items())
    real = (
        f" The probe, fitted on {figures.ceiling['train']:.0f} photographs, reads {figures.ceiling['probe']:.3f} of the"
        " real photographs right that were edited with their own captions."
        if figures.ceiling
        else ""
    )
    parts = [
        f"`instgenie bench quality`: {about}.\n",
        "### What is promised\n",
        bar_table(figures),
        f"### Methods, mask ratios {ratios[0]:g} to {ratios[-1]:g}\n",
        table(figures, shown_methods(figures), [*COSTS, *CLOSENESS, *BORDER, *SETS], ratios),
        "*operations* and *time* of the steps are shares of dense. *new seams*: pictures whose jump across the mask's "
        f"border is more than {JUMP_BAR} of the dense edit's. KID-EffLite0 and probe look at "
        f"the mask's box.{real}\n",
        "![SSIM by mask ratio](quality-ratio.svg)\n",
        "![Jump across the border of every picture](quality-jump.svg)\n",
        "### `balanced` by mask ratio\n",
        ratio_table(figures),
        "### What each knob does\n",
        table(figures, knob_methods(figures), [*COSTS, *CLOSENESS[:3], *BORDER, *SETS], ratios),
        "![Fidelity against cost](quality-cost.svg)\n",
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
    path.write_text(put_between(before, report(figures, bool(shown))), encoding="utf-8")


def put_between(page: str, new: str) -> str:
    """The page with its part between the marks replaced; at the end where it has none."""
    head, start, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return f"{head}{START}\n{new}{END}{tail}" if start else f"{page}\n{START}\n{new}{END}\n"


def print_report(figures: Figures) -> None:
    ratios = bar_ratios(figures)
    columns = [*COSTS, *CLOSENESS[:2], *BORDER[1:], *SETS]
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

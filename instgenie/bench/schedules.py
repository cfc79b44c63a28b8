"""Tables of methods against the dense edit: the study of schedules, that is of edits without a template by the steps at
which they compute every token, and the study of products of low precision. Knows figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from instgenie.bench.charts import draw_grid
from instgenie.bench.figures import JUMP_BAR, RATIOS, Figures, mean, share
from instgenie.bench.markdown import markdown_table
from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.variants import DENSE, Outcome, Sample
from instgenie.pictures.picture import save_picture

MAX_LOSS = 0.003  # of SSIM in the box against a registered template at balanced, for a schedule to be accepted
HEADINGS = ("activations", "operations", "MB", "SSIM in the box", "worst", "new seams", "accepted")
Study = Literal["schedules", "reuse", "quantization"]
TITLES: dict[Study, str] = {
    "schedules": "Schedules of dense steps",
    "reuse": "What edits read: schedules, strides, bits, padding",
    "quantization": "Products of low precision",
}
FLOOR = 0.0005  # of the plot's logarithmic axis


def table_rows(figures: Figures) -> list[list[str]]:
    """One row per method: its cost, its closeness to the dense edit, and whether `balanced` may use it."""
    registered = mean(figures.values(figures.qualities["balanced"], "ssim_box", RATIOS))
    base_seams = seams(figures, figures.qualities["balanced"])
    rows = []
    for name in figures.methods:
        boxes = figures.values(name, "ssim_box", RATIOS)
        is_close = mean(boxes) >= registered - MAX_LOSS and seams(figures, name) <= base_seams
        cost = mean(figures.values(name, "cost", RATIOS))
        accepted = "" if name == DENSE else ("yes" if is_close else "no")
        new_seams = f"{seams(figures, name):.0%}"
        sizes = figures.values(name, "bytes", RATIOS)
        size = f"{mean(sizes) / 1e6:.1f}" if sizes else ""
        rows.append([name, f"{cost:.2f}", size, f"{mean(boxes):.4f}", f"{min(boxes):.4f}", new_seams, accepted])
    return sorted(rows, key=lambda row: float(row[1]), reverse=True)


def seams(figures: Figures, name: str) -> float:
    """The share of pictures with a seam that the dense edit does not have."""
    return share([jump > JUMP_BAR for jump in figures.jumps(name, RATIOS)])


def print_schedules(figures: Figures, name: Study = "schedules") -> None:
    table = Table(title=f"{name}, {figures.run['pictures']} photographs, {figures.run['steps']} steps")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in table_rows(figures):
        table.add_row(*row)
    Console(width=120).print(table)


def write_schedules(
    figures: Figures, shown: Sequence[tuple[Sample, list[Outcome]]], folder: Path, name: Study = "schedules"
) -> None:
    """Write the table, a plot and a sheet of the examples."""
    (folder / f"{name}.svg").write_text(schedule_chart(figures, TITLES[name]).svg())
    text = [f"# {TITLES[name]}", "", *describe(figures), "", f"![fidelity against cost]({name}.svg)", ""]
    if shown:
        save_picture(draw_grid(shown, figures), folder / f"{name}.png")
        text += [f"![the examples]({name}.png)", ""]
    text += [markdown_table([list(HEADINGS), *table_rows(figures)]), ""]
    (folder / f"{name}.md").write_text("\n".join(text))


def describe(figures: Figures) -> list[str]:
    num_pictures, num_steps = figures.run["pictures"], figures.run["steps"]
    return [
        f"Edits of {num_pictures} held-out photographs in {num_steps} steps, compared with the dense edit of the same",
        "seed. `own` edits have no template: the numbers are the steps that compute every token, and the other steps",
        "read what the last of these left. `kv` edits read a registered template, of as many MB: all of its steps in",
        "the model's own numbers, or as named. With `padding read`, the padding of the prompt is read from the",
        f"activations, too. A way is accepted if it loses at most {MAX_LOSS} of SSIM in the mask's box against the",
        "registered `balanced` and adds no seam.",
    ]


def schedule_chart(figures: Figures, title: str) -> Chart:
    """The distance from the dense edit against operations, one labelled mark per method."""

    def series(about: str, is_own: bool, reads_padding: bool = False) -> Series | None:
        wanted = is_own, reads_padding
        names = [name for name in figures.methods if (name.startswith("own"), "padding read" in name) == wanted]
        names = [name for name in names if name != DENSE]
        points = [(mean_cost(figures, name), max(1 - mean_box(figures, name), FLOOR)) for name in names]
        labels = [name.removeprefix("own, ").replace(", padding read", "") for name in names]
        return Series(about, points, labels, False, "dot" if is_own else "cross") if names else None

    drawn = [
        series("own: dense at steps", True),
        series("registered template", False),
        series("own, padding read", True, True),
        series("template, padding read", False, True),
    ]

    ticks = (0.001, 0.003, 0.01, 0.03, 0.1)
    return Chart(
        title,
        Axis("operations, as a share of dense", (0, 0.2, 0.4, 0.6, 0.8, 1), 0, 1),
        Axis("1 − SSIM in the mask's box (lower is closer)", ticks, FLOOR, 0.2, log=True),
        [one for one in drawn if one],
    )


def mean_box(figures: Figures, name: str) -> float:
    return mean(figures.values(name, "ssim_box", RATIOS))


def mean_cost(figures: Figures, name: str) -> float:
    return mean(figures.values(name, "cost", RATIOS))

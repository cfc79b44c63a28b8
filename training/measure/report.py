"""The measured figures as a file, a table in the terminal and Markdown. Knows no model.

    python -m training.measure.report FIGURES PAGE

writes the tables of a figures.json between two marks of a Markdown page, so that no figure is typed by hand.
"""

import argparse
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from instgenie.adapters.shipped import CONTROLNETS, LORAS
from instgenie.bench.markdown import markdown_table, put_between
from training.measure.bars import GROUPS, ROWS, Group, Row
from training.measure.bench import Values

NEW, OLD = "new", "old"
START, END = "<!-- figures -->", "<!-- end of figures -->"
COLOURS = {"pass": "green", "miss": "red", "": "white"}


@dataclass
class Measured:
    """The figures of one model, of one group after the other."""

    digest: str  # of its folder
    figures: dict[str, Values] = field(default_factory=dict)


@dataclass
class FigureReport:
    models: dict[str, Measured] = field(default_factory=dict)
    real: dict[str, Values] = field(default_factory=dict)  # the same figures of real photographs and scenes
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # group -> how it was measured

    def value(self, model: str, row: Row) -> float | None:
        measured = self.models.get(model)
        return measured.figures.get(row.group, {}).get(row.name) if measured else None

    def keep_from(self, other: "FigureReport") -> None:
        """Take over the groups that were not measured now, of models that are still the same."""
        for name, measured in self.models.items():
            known = other.models.get(name)
            if known and known.digest == measured.digest:
                measured.figures = known.figures | measured.figures
        self.models = other.models | self.models
        self.real = other.real | self.real
        self.runs = other.runs | self.runs

    def rows(self, group: Group) -> list[tuple[str, str, str, str, str]]:
        """Name, new, old, bar and verdict of each figure that was measured."""
        lines = []
        for row in (row for row in ROWS if row.group == group):
            new, old = self.value(NEW, row), self.value(OLD, row)
            if new is None and old is None:
                continue
            real = self.real.get(group, {})
            verdict = row.bar.judge(new, old, real) if new is not None else ""
            lines.append((row.name, row.text(new), row.text(old), row.bar_text(old, real), verdict))
        return lines

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(plain(asdict(self)), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "FigureReport":
        data = json.loads(path.read_text())
        return cls({name: Measured(**one) for name, one in data["models"].items()}, data["real"], data["runs"])


def plain(value: Any) -> Any:
    """Numbers short enough to read, and no NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: inner for name, one in value.items() if (inner := plain(one)) is not None}
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def digest(folder: Path) -> str:
    """Of every file of a pipeline folder but its adapters, which may be fitted after it is measured."""
    hashed = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        place = path.relative_to(folder)
        if place.parts[0] in (LORAS, CONTROLNETS):
            continue
        hashed.update(f"{place.as_posix()} {path.stat().st_size}\n".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def terminal_table(report: FigureReport) -> Table:
    table = Table("figure", "new", "old", "bar", "", title="built-in model")
    for group in GROUPS:
        lines = report.rows(group)
        if lines:
            table.add_section()
            table.add_row(f"[bold]{group}")
        for name, new, old, bar, verdict in lines:
            table.add_row(f"  {name}", new, old, bar, f"[{COLOURS[verdict]}]{verdict}")
    return table


def markdown(report: FigureReport) -> str:
    parts = []
    for group in GROUPS:
        lines = report.rows(group)
        if lines:
            table = markdown_table([(group.capitalize(), NEW, OLD, "bar", ""), *lines])
            parts.append(table + "\n" + notes(report, group))
    return "\n".join(parts)


def notes(report: FigureReport, group: Group) -> str:
    """The figures of real photographs, to compare with, and how the group was measured."""
    known = report.real.get(group, {}).items()
    real = "; ".join(f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}" for name, value in known)
    run = report.runs.get(group, {})
    how = "Measured on {device}, {steps} steps, guidance {guidance:g}.".format(**run) if run else ""
    return " ".join(part for part in (f"Real: {real}." if real else "", how) if part) + "\n"


def write_page(report: FigureReport, page: Path) -> None:
    page.write_text(put_between(page.read_text(), markdown(report), START, END))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="a figures.json of training.evaluate")
    parser.add_argument("page", type=Path, help="the Markdown page; without marks, the tables go to its end")
    args = parser.parse_args(arguments)
    write_page(FigureReport.load(args.figures), args.page)


if __name__ == "__main__":
    main()

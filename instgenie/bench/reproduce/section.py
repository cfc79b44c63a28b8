"""A part of the report: tables whose rows can be linked to, charts and findings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from instgenie.bench.plots import Chart, Strips


@dataclass(frozen=True)
class Row:
    anchor: str  # unique in the report
    cells: Sequence[str]


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    paper: str  # the paper's finding
    here: str  # how it is measured here
    tables: Sequence[Table]
    charts: Sequence[Chart | Strips] = ()
    findings: Sequence[str] = field(default=())  # sentences with the main figures

    @property
    def anchors(self) -> list[str]:
        return [self.name, *(row.anchor for table in self.tables for row in table.rows)]


def row(name: str, *cells: object, key: Sequence[object] | None = None) -> Row:
    """Make a row of a part. Its anchor is the part's name and the key, which is the first cell by default."""
    parts = [name, *(cells[:1] if key is None else key)]
    return Row("-".join(slug(str(part)) for part in parts), [text(cell) for cell in cells])


def slug(words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def text(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def times(value: float) -> str:
    return f"{value:.2f}×"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds >= 0.01 else f"{1000 * seconds:.3f}"

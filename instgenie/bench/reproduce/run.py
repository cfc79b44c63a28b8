"""Runs parts of the report, one after the other, and writes what they found."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as Printed

from instgenie.bench.reproduce import (
    fig4,
    fig6,
    fig11,
    fig12,
    fig14,
    fig15,
    fig16,
    overheads,
    simulator,
    table2,
)
from instgenie.bench.reproduce.lab import SCALES, Lab
from instgenie.bench.reproduce.page import write_page
from instgenie.bench.reproduce.section import Section, Table
from instgenie.bench.scatter import write_text
from instgenie.errors import InstGenieError
from instgenie.models.flux_model import FluxModel
from instgenie.models.load import load

Part = Callable[[Lab], Section]
PARTS: dict[str, Part] = {
    "fig4": fig4.run,
    "fig6": fig6.run,
    "fig11": fig11.run,
    "fig12": fig12.run,
    "fig14": fig14.run,
    "fig15": fig15.run,
    "fig16": fig16.run,
    "table2": table2.run,
    "overheads": overheads.run,
    "simulator": simulator.run,
}
# seconds of each part with the built-in model on two quiet cores, all parts in this order: what is measured once counts
# with the first part that asks for it
BUDGETS: dict[str, float] = {
    "fig4": 200,
    "fig6": 15,
    "fig11": 5,
    "fig12": 80,
    "fig14": 100,
    "fig15": 100,
    "fig16": 20,
    "table2": 90,
    "overheads": 30,
    "simulator": 200,
}
FLUX_ONLY = ("fig6", "table2")


def reproduce(name: str, model: str, device: str, out: Path | None, json_path: Path | None) -> None:
    if name != "all" and name not in PARTS:
        raise InstGenieError(f"there is no part {name!r}: all, {', '.join(PARTS)} are known")
    if json_path and not json_path.parent.is_dir():
        raise InstGenieError(f"{json_path} cannot be written: there is no folder {json_path.parent}")
    names = list(PARTS) if name == "all" else [name]
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = load(model, device)
    if not isinstance(loaded, FluxModel):
        names = [name for name in names if name not in FLUX_ONLY]
        if not names:
            raise InstGenieError(f"the part {name!r} is written for Flux: the model {model!r} is none")
    lab = Lab(model, loaded, SCALES[loaded.device.type])
    sections = run_parts(names, lab, console)
    for section, _ in sections:
        print_section(section)
    if out:
        write_page(sections, lab.machine, out / ("index.html" if name == "all" else f"{name}.html"))
    if json_path:
        write_text(as_json(sections, lab.machine), json_path)


def run_parts(names: Sequence[str], lab: Lab, console: Console) -> list[tuple[Section, float]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[doing]}"),
    )
    sections = []
    with Progress(*columns, console=console) as progress:
        total = sum(BUDGETS[name] for name in names)
        task = progress.add_task(f"about {total / 60:.0f} minutes", total=total, doing="")
        for name in names:
            lab.tell = partial(tell, progress, task, name)
            start = time.perf_counter()
            section = PARTS[name](lab)
            seconds = time.perf_counter() - start
            sections.append((section, seconds))
            progress.advance(task, BUDGETS[name])
            console.print(f"{name:<10} {seconds:6.1f} s of {BUDGETS[name]:g}  {section.title}", highlight=False)
    return sections


def tell(progress: Progress, task: TaskID, name: str, doing: str) -> None:
    """Beside the bar; as a line where there is no terminal to draw it on."""
    progress.update(task, doing=f"{name}: {doing}")
    if not progress.console.is_terminal:
        progress.console.print(f"{name}: {doing}", highlight=False)


def print_section(section: Section) -> None:
    console = Console()
    for table in section.tables:
        console.print(printed(table, f"{section.name}: {table.title}"))
    for finding in section.findings:
        console.print(finding, highlight=False)


def printed(table: Table, title: str) -> Printed:
    shown = Printed(title=title)
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if place else "left")
    for line in table.rows:
        shown.add_row(*line.cells)
    return shown


def as_json(sections: Sequence[tuple[Section, float]], machine: Mapping[str, str | int]) -> str:
    """Tables and findings; charts are drawn from them."""
    parts = {
        section.name: {
            "title": section.title,
            "seconds": round(seconds, 1),
            "findings": list(section.findings),
            "tables": [asdict(table) for table in section.tables],
        }
        for section, seconds in sections
    }
    return json.dumps({"machine": dict(machine), "parts": parts}, indent=1) + "\n"

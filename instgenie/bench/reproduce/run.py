"""Runs parts of the report one after the other and writes the results."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as Printed

from instgenie.bench.files import check_folder, write_text
from instgenie.bench.machine import Machine
from instgenie.bench.reproduce import (
    adapters,
    fig4,
    fig6,
    fig11,
    fig12,
    fig14,
    fig15,
    fig16,
    optimisations,
    overheads,
    patches,
    simulator,
    switching,
    table2,
)
from instgenie.bench.reproduce.lab import SCALES, Lab
from instgenie.bench.reproduce.page import write_page
from instgenie.bench.reproduce.section import Section, Table
from instgenie.errors import InstGenieError
from instgenie.models.flux.model import is_flux
from instgenie.models.loading.load import load
from instgenie.telemetry.progress import Progress, show_status

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
SWIFT_PARTS: dict[str, Part] = {  # of another paper, SwiftDiffusion: `all` leaves them out, `swift` names them
    "optimisations": optimisations.run,
    "adapters": adapters.run,
    "switching": switching.run,
}
PATCHED_PARTS: dict[str, Part] = {"patches": patches.run}  # of PatchedServe: `patched` names them
# seconds of each part with the built-in model on two idle cores, all parts run in this order: a shared measurement
# counts with the first part that needs it
BUDGETS: dict[str, float] = {
    "fig4": 205,
    "fig6": 10,
    "fig11": 1,
    "fig12": 80,
    "fig14": 100,
    "fig15": 105,
    "fig16": 5,
    "table2": 95,
    "overheads": 30,
    "simulator": 215,
    "optimisations": 90,
    "adapters": 300,
    "switching": 5,
    "patches": 480,
}
FLUX_ONLY = ("fig6", "table2")


def reproduce(
    names: Sequence[str],
    model: str,
    device: str,
    out: Path | None,
    json_path: Path | None,
    adapter_trace: Path | None = None,
) -> None:
    chosen = choose_parts(names)
    check_folder(json_path)
    console = Console(stderr=True)
    with show_status("loading the model", console):
        loaded = load(model, device)
    if not is_flux(loaded):
        left_out = [name for name in chosen if name in FLUX_ONLY]
        chosen = [name for name in chosen if name not in FLUX_ONLY]
        if left_out:
            console.print(f"left out, because they need a Flux model: {', '.join(left_out)}", highlight=False)
        if not chosen:
            raise InstGenieError(f"{' and '.join(names)} need a Flux model: {model!r} is not one")
    lab = Lab(model, loaded, SCALES[loaded.device.type], adapter_trace=adapter_trace)
    sections: list[tuple[Section, float]] = []
    for section, seconds in run_parts(chosen, lab, console):
        sections.append((section, seconds))
        print_section(section)
        if json_path:  # so that no result is lost if a later part fails
            write_text(as_json(sections, lab.machine), json_path)
    if out:
        page = f"{chosen[0]}.html" if len(chosen) == 1 else "index.html"
        write_page(sections, lab.machine, out / page, " ".join(names))


def choose_parts(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in ("all", "swift", "patched", *PARTS, *SWIFT_PARTS, *PATCHED_PARTS):
            known = ", ".join(("all", *PARTS, "swift", *SWIFT_PARTS, "patched", *PATCHED_PARTS))
            raise InstGenieError(f"unknown part {name!r}: the parts are {known}")
    groups = (("all", PARTS), ("swift", SWIFT_PARTS), ("patched", PATCHED_PARTS))
    return [name for group, parts in groups for name in parts if name in names or group in names]


def run_parts(names: Sequence[str], lab: Lab, console: Console) -> Iterator[tuple[Section, float]]:
    """Run the parts, and yield each section with the seconds it took."""
    with Progress(console) as progress:
        total = sum(BUDGETS[name] for name in names)
        task = progress.add(f"about {max(total / 60, 1):.0f} minutes", total, is_counted=False)
        for name in names:
            lab.tell = lambda doing, name=name: task.say(f"{name}: {doing}")  # type: ignore[misc]
            start = time.perf_counter()
            section = (PARTS | SWIFT_PARTS | PATCHED_PARTS)[name](lab)
            seconds = time.perf_counter() - start
            task.advance(BUDGETS[name])
            console.print(f"{name:<10} {seconds:6.1f} s of {BUDGETS[name]:g}  {section.title}", highlight=False)
            yield section, seconds


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


def as_json(sections: Sequence[tuple[Section, float]], machine: Machine) -> str:
    """Return tables and findings; charts are drawn from the same figures."""
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

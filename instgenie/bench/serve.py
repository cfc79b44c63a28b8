"""Sends a workload to a running server over HTTP and measures throughput, latencies and deadlines met.

The deadline of an edit is `slo_scale` times the latency of an edit on the idle server, measured before the load begins.
With `--compare` servers take turns: ours; one that computes every token and prepares, denoises and finishes batch
after batch; and one that computes every token, lets edits join at every step, and prepares and finishes between steps.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.latencies import Latencies
from instgenie.bench.load_client import (
    NUM_ALONE,
    EditAnswer,
    LoadClient,
    draw_masks,
    host_text,
    http_client,
    started,
    templates_of,
)
from instgenie.bench.workload import Arrival
from instgenie.telemetry.progress import Progress

FIRST_OTHER = 10**6  # number of the first picture that no workload has
TABLE_WIDTH = 136
SYSTEMS = {  # flags of the servers that --compare starts
    "instgenie": ["--batching", "continuous"],
    "static batches, dense": ["--batching", "static", "--no-reuse"],
    "naive batches, dense": ["--batching", "naive", "--no-reuse"],
}


@dataclass(frozen=True)
class ServeStudy:
    """The workload and its limits, the same for every server."""

    title: str  # of the workload
    workload: tuple[Arrival, ...]
    max_concurrency: int
    slo_scale: float
    registers: bool = True  # pictures are registered before the load begins
    flags: tuple[str, ...] = ()  # of the servers that are started


@dataclass(frozen=True)
class ServeRow:
    system: str
    num_finished: int
    num_failed: int
    duration_s: float
    throughput: float  # edits per second
    mean_s: float
    median_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    slo_attainment: float
    alone_s: float
    mask_ratio: float
    num_interruptions: int | None  # of step loops by other work, under load; None: the server does not report them


def bench_serve(study: ServeStudy, base_url: str, api_key: str | None, json_path: Path | None) -> None:
    check_folder(json_path)
    rows = [asyncio.run(measure("server", study, base_url, api_key))]
    report(rows, study, json_path)


def compare(study: ServeStudy, systems: Sequence[str], model: str, device: str, json_path: Path | None) -> None:
    check_folder(json_path)
    rows = []
    for system in systems:
        with started(model, device, len(study.workload), [*study.flags, *SYSTEMS[system]]) as base_url:
            rows.append(asyncio.run(measure(system, study, base_url, None)))
    report(rows, study, json_path)


async def measure(system: str, study: ServeStudy, base_url: str, api_key: str | None) -> ServeRow:
    templates = templates_of(study.workload)
    async with http_client(base_url, api_key) as client:
        sender = LoadClient(client, study.max_concurrency)
        with Progress(transient=True) as progress:
            await sender.check()
            await sender.register_all(templates if study.registers else (), progress, f"{system}: templates")
            ratio = statistics.median(arrival.mask_ratio for arrival in study.workload)
            alone = await sender.alone(templates if study.registers else others_like(templates), ratio)
            task = progress.add(f"{system}: edits", len(study.workload))
            before = await sender.num_interruptions()
            draw_masks(study.workload)
            start = time.perf_counter()
            answers = await sender.run(study.workload, on_answer=task.advance)
            row = make_row(system, answers, time.perf_counter() - start, alone, study.slo_scale)
            after = await sender.num_interruptions()
            return row if before is None or after is None else replace(row, num_interruptions=after - before)


def others_like(templates: Sequence[Arrival]) -> list[Arrival]:
    """Edits of pictures that no workload has, as many as are sent to the idle server."""
    return [replace(templates[index % len(templates)], template=FIRST_OTHER + index) for index in range(NUM_ALONE + 1)]


def make_row(system: str, answers: Sequence[EditAnswer], duration: float, alone: float, slo_scale: float) -> ServeRow:
    finished = [answer for answer in answers if not answer.error]
    latencies = [answer.latency for answer in finished] or [float("nan")]
    in_time = sum(answer.latency <= slo_scale * alone for answer in finished)
    return ServeRow(
        system=system,
        num_finished=len(finished),
        num_failed=len(answers) - len(finished),
        duration_s=round(duration, 3),
        throughput=round(len(finished) / duration, 3),
        **Latencies.of(latencies).figures,
        slo_attainment=round(in_time / len(answers), 3),
        alone_s=round(alone, 3),
        mask_ratio=round(statistics.mean(answer.mask_ratio for answer in answers), 3),
        num_interruptions=None,
    )


def report(rows: Sequence[ServeRow], study: ServeStudy, json_path: Path | None) -> None:
    machine = host_text()
    table = Table(title=f"{study.title}, {machine}")
    columns = (
        "edits/s",
        "mean s",
        "median",
        "P90",
        "P95",
        "P99",
        "SLO",
        "alone s",
        "mask ratio",
        "interrupted",
        "failed",
    )
    table.add_column("system", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        figures = (row.throughput, row.mean_s, row.median_s, row.p90_s, row.p95_s, row.p99_s)
        table.add_row(
            row.system,
            *(f"{figure:.2f}" for figure in figures),
            f"{row.slo_attainment:.0%}",
            f"{row.alone_s:.2f}",
            f"{row.mask_ratio:.2f}",
            "–" if row.num_interruptions is None else str(row.num_interruptions),
            str(row.num_failed),
        )
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)
    if json_path:
        about = {"workload": study.title, "max_concurrency": study.max_concurrency, "slo_scale": study.slo_scale}
        content = {"machine": machine, "plan": about, "rows": [asdict(row) for row in rows]}
        write_json(content, json_path)

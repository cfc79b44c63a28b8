"""Edits in time on real servers, by policy and load. Each policy has a server, which gets the same edits over HTTP,
with deadlines.

The first server is measured while it is idle: an edit's deadline is a multiple of what edits of its size, steps and
mask take alone, and loads are shares of the rate at which the server works off a burst.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_text
from instgenie.bench.latencies import Latencies
from instgenie.bench.load_client import (
    EditAnswer,
    LoadClient,
    draw_masks,
    host_text,
    http_client,
    started,
    templates_of,
)
from instgenie.bench.points import DeadlinePoint, rate_chart, summary
from instgenie.bench.recorder import StepRecorder
from instgenie.bench.served import AloneSeconds, ServedEdit, ServedRecord, ServedRun, ServedStudy, read_record
from instgenie.bench.workload import Arrival, WorkloadRecipe, draw_workload
from instgenie.errors import ServeError
from instgenie.scheduling.names import Scheduling
from instgenie.telemetry.progress import Progress

NUM_WARM, NUM_BURST = 8, 24
NUM_RATIOS = 3  # masks whose edits are measured alone, from the smallest to the largest
MAX_QUEUE = 10_000
NAME = "attainment"


def bench_attainment(
    study: ServedStudy,
    policies: Sequence[Scheduling],
    loads: Sequence[float],
    out: Path,
    is_together: bool = False,
) -> None:
    """Measure each policy at each load, print a table and write the record and the chart into a folder. What the folder
    has of the same study already is not measured again."""
    check_folder(out)
    out.mkdir(exist_ok=True)
    path, say = out / f"{NAME}.json", Console(width=120, highlight=False).print
    record = read_record(path) if path.exists() else None
    if record and record.study != study:
        raise ServeError(f"{path} has another study: choose another folder, or delete the file")
    for group in [list(policies)] if is_together else [[policy] for policy in policies]:
        missing = [policy for policy in group if not record or not all(record.has(policy, load) for load in loads)]
        with ExitStack() as servers:
            urls = {
                policy: servers.enter_context(
                    started(study.model, study.device, MAX_QUEUE, ["--scheduling", policy, *study.flags])
                )
                for policy in missing
            }
            for url in urls.values():
                record = asyncio.run(warm_up(study, url, record))
            for load in loads:
                for policy, url in urls.items():
                    if record and not record.has(policy, load):
                        run = asyncio.run(measure_run(record, policy, load, url))
                        record.runs.append(run)
                        record.write(path)
                        say(line_of(run))
    if record:
        report(record, out)


def workload_at(study: ServedStudy, rate: float, num_edits: int | None = None) -> list[Arrival]:
    num = max(round(rate * study.seconds), 1) if num_edits is None else num_edits
    return draw_workload(replace(study.recipe, rate=rate, num_edits=num))


async def warm_up(study: ServedStudy, url: str, record: ServedRecord | None) -> ServedRecord:
    """Register the templates and send some edits; measure a burst and edits alone, if nobody has yet."""
    burst = [replace(arrival, at=0.0) for arrival in workload_at(study, 1.0, NUM_BURST)]
    async with http_client(url) as client:
        sender, recorder = LoadClient(client), StepRecorder()
        with Progress(transient=True) as progress:
            templates = all_templates(study.recipe)
            await sender.register_all(templates, progress, "templates")
            draw_masks(burst)
            check(await sender.run(burst[:NUM_WARM]))
            if record:
                return record
            start = time.perf_counter()
            async with recorder.following(client):
                check(await sender.run(burst))
                capacity = NUM_BURST / (time.perf_counter() - start)
            alone = await measure_alone(sender, templates, [arrival.mask_ratio for arrival in workload_at(study, 1.0)])
    return ServedRecord(study, host_text(), recorder.num_workers, recorder.max_batch_size, capacity, alone)


def all_templates(recipe: WorkloadRecipe) -> list[Arrival]:
    """One edit of every picture in every size and number of steps."""
    [any_edit] = draw_workload(replace(recipe, rate=1.0, num_edits=1))
    return templates_of(
        [
            replace(any_edit, template=template, size=size, steps=steps)
            for template in range(recipe.num_templates)
            for size in recipe.sizes
            for steps in recipe.steps
        ]
    )


async def measure_alone(
    sender: LoadClient, templates: Sequence[Arrival], ratios: Sequence[float]
) -> tuple[AloneSeconds, ...]:
    low, high = min(ratios), max(ratios)
    chosen = tuple(low + (high - low) * index / (NUM_RATIOS - 1) for index in range(NUM_RATIOS))
    found = []
    for kind in dict.fromkeys((template.size, template.steps) for template in templates):
        own = [template for template in templates if (template.size, template.steps) == kind]
        seconds = [await sender.alone(own, ratio) for ratio in chosen]
        found.append(AloneSeconds(*kind, chosen, tuple(seconds)))
    return tuple(found)


async def measure_run(record: ServedRecord, policy: Scheduling, load: float, url: str) -> ServedRun:
    rate = load * record.capacity
    workload = workload_at(record.study, rate)
    draw_masks(workload)
    deadlines = [record.deadline_of(arrival) for arrival in workload]
    async with http_client(url) as client:
        sender, recorder = LoadClient(client), StepRecorder()
        with Progress(transient=True) as progress:
            task = progress.add(f"{policy}, load {load:.0%}", len(workload))
            async with recorder.following(client):
                answers = await sender.run(workload, deadlines, task.advance)
    edits = [served_edit(*one) for one in zip(workload, deadlines, answers, strict=True)]
    return ServedRun(policy, load, rate, tuple(edits), tuple(recorder.steps()))


def served_edit(arrival: Arrival, deadline: float, answer: EditAnswer) -> ServedEdit:
    about = arrival.at, arrival.template, arrival.steps, deadline, answer.latency
    if not (facts := answer.facts):
        return ServedEdit(*about, answer.error)
    seconds = facts["seconds"]
    return ServedEdit(
        *about,
        num_tokens=facts["num_tokens"],
        num_masked_tokens=facts["num_masked_tokens"],
        prepare=seconds["prepare"],
        finish=seconds["finish"],
        outside=answer.latency - sum(seconds.values()),
        num_preemptions=facts["num_preemptions"],
        predicted=facts["predicted_ms"] / 1000,
    )


def check(answers: Sequence[EditAnswer]) -> None:
    if failed := [answer.error for answer in answers if answer.error]:
        raise ServeError(f"{len(failed)} of {len(answers)} edits failed: {failed[0]}")


# what was measured


def point_of(run: ServedRun) -> DeadlinePoint:
    mean = round(statistics.fmean(run.latencies), 3)
    num_preemptions = sum(edit.num_preemptions for edit in run.edits)
    return DeadlinePoint("served", 1, run.load, run.policy, run.rate, round(run.attainment, 4), mean, num_preemptions)


def line_of(run: ServedRun) -> str:
    return f"{run.policy}, load {run.load:.0%} ({run.rate:.2f}/s): {run.attainment:.1%} of {len(run.edits)} in time"


def report(record: ServedRecord, out: Path) -> None:
    console = Console(width=120, highlight=False)
    console.print(table_of(record))
    points = [point_of(run) for run in record.runs]
    for sentence in summary(points):
        console.print(sentence)
    model = Path(record.study.model).name  # of a folder its name
    write_text(rate_chart(f"Edits in time on a real server: {model}", points).svg(), out / f"{NAME}.svg")


def title_of(record: ServedRecord) -> str:
    recipe = record.study.recipe
    sizes = ", ".join(f"{width}x{height}" for height, width in recipe.sizes)
    steps = ", ".join("the model's own" if one is None else str(one) for one in recipe.steps)
    return f"{record.study.model}: sizes {sizes}, steps {steps}, masks of {recipe.mask_ratios}"


def table_of(record: ServedRecord) -> Table:
    about = f"deadlines {record.study.slo_scale:g} times alone, {record.study.seconds:g} s each; {record.machine}"
    table = Table("load", "policy", title=f"{title_of(record)}\n{about}")
    for heading in ("edits/s", "edits", "in time", "mean s", "P95 s", "preempted", "predictions off by", "failed"):
        table.add_column(heading, justify="right")
    for run in sorted(record.runs, key=lambda run: run.load):
        latencies, point = Latencies.of(run.latencies), point_of(run)
        num_failed = sum(bool(edit.error) for edit in run.edits)
        table.add_row(
            f"{run.load:.0%}",
            run.policy,
            f"{run.rate:.2f}",
            str(len(run.edits)),
            f"{run.attainment:.1%}",
            f"{latencies.mean:.2f}",
            f"{latencies.p95:.2f}",
            str(point.num_preemptions),
            "–" if run.prediction_error is None else f"{run.prediction_error:.0%}",
            str(num_failed),
        )
    return table

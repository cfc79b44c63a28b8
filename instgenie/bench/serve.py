"""Sends a workload to a running server over HTTP and measures throughput, latencies and deadlines met.

The deadline of an edit is `slo_scale` times the latency of an edit on the idle server, measured before the load begins.
With `--compare` servers take turns: ours; one that computes every token and prepares, denoises and finishes batch
after batch; and one that computes every token, lets edits join at every step, and prepares and finishes between steps.
With `--scheduling` a server of each policy takes its turn, and requests have deadlines: `slo_scale` times the latency
of an edit of the same mask and steps on an idle server, measured once for all policies.
"""

import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.latencies import Latencies
from instgenie.bench.pictures import make_mask, make_picture
from instgenie.bench.workload import Arrival
from instgenie.errors import ServeError
from instgenie.scheduling.names import Scheduling
from instgenie.telemetry.progress import Progress, show_status

NUM_ALONE = 3
FIRST_OTHER = 10**6  # number of the first picture that no workload has
TIMEOUT = 1800.0
TABLE_WIDTH = 136
INTERRUPTIONS = "instgenie:step_loop_interruptions_total{"
SYSTEMS = {  # flags of the servers that --compare starts
    "instgenie": ["--batching", "continuous"],
    "static batches, dense": ["--batching", "static", "--no-reuse"],
    "naive batches, dense": ["--batching", "naive", "--no-reuse"],
}


Kind = tuple[int | None, float]  # steps and mask ratio of an edit


def kind_of(arrival: Arrival) -> Kind:
    return arrival.steps, round(arrival.mask_ratio, 2)


@dataclass(frozen=True)
class ServeStudy:
    """The workload and its limits, the same for every server."""

    title: str  # of the workload
    workload: tuple[Arrival, ...]
    max_concurrency: int
    slo_scale: float
    deadlines: Mapping[Kind, float] | None = None  # seconds that requests give; None: they give none
    registers: bool = True  # pictures are registered before the load begins
    flags: tuple[str, ...] = ()  # of the servers that are started

    @property
    def templates(self) -> list[Arrival]:
        """One edit of every picture, size and number of steps."""
        first = {(arrival.template, arrival.size, arrival.steps): arrival for arrival in reversed(self.workload)}
        return list(first.values())


@dataclass(frozen=True)
class EditAnswer:
    """The answer to one edit, as its client saw it."""

    latency: float
    mask_ratio: float
    error: str  # empty: none
    deadline: float | None = None  # seconds; None: the same for all edits


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


def compare_scheduling(
    study: ServeStudy, schedulings: Sequence[Scheduling], model: str, device: str, json_path: Path | None
) -> None:
    check_folder(json_path)
    rows = []
    for scheduling in schedulings:
        flags = [*study.flags, "--scheduling", scheduling]
        with started(model, device, len(study.workload), flags) as base_url:
            if study.deadlines is None:
                study = replace(study, deadlines=asyncio.run(measure_deadlines(study, base_url)))
            rows.append(asyncio.run(measure(scheduling, study, base_url, None)))
    report(rows, study, json_path)


async def measure_deadlines(study: ServeStudy, base_url: str) -> dict[Kind, float]:
    """Seconds within which edits of each kind should be done."""
    first = {kind_of(arrival): arrival for arrival in study.workload}
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT, trust_env=False) as client:
        sender = LoadClient(client, study)
        for template in study.templates if study.registers else ():
            await sender.register(template)
        return {kind: study.slo_scale * await sender.alone([arrival], arrival) for kind, arrival in first.items()}


@contextmanager
def started(model: str, device: str, max_queue: int, flags: Sequence[str]) -> Iterator[str]:
    """Start a server, and yield its address while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "instgenie", "serve", model, "--device", device, "--port", port]
    command += ["--max-queue", str(max(64, max_queue)), "--log-format", "text", "--no-register-examples", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INSTGENIE_")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(base_url: str, process: subprocess.Popen[bytes]) -> None:
    with show_status("starting a server"):
        while process.poll() is None:
            try:
                if httpx.get(f"{base_url}/ready", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise ServeError(f"the server ended with {process.returncode} before it was ready: run instgenie serve to see why")


async def measure(system: str, study: ServeStudy, base_url: str, api_key: str | None) -> ServeRow:
    templates = study.templates
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False
    ) as client:
        sender = LoadClient(client, study)
        with Progress(transient=True) as progress:
            await sender.check()
            task = progress.add(f"{system}: templates", len(templates))
            for template in templates if study.registers else ():
                await sender.register(template)
                task.advance()
            alone = await sender.alone(templates)
            task = progress.add(f"{system}: edits", len(study.workload))
            before = await sender.num_interruptions()
            sender.draw_masks()
            start = time.perf_counter()
            answers = await sender.run(task.advance)
            row = make_row(system, answers, time.perf_counter() - start, alone, study.slo_scale)
            after = await sender.num_interruptions()
            return row if before is None or after is None else replace(row, num_interruptions=after - before)


class LoadClient:
    """A client that registers templates and sends the edits of a workload."""

    def __init__(self, client: httpx.AsyncClient, study: ServeStudy) -> None:
        self.client = client
        self.study = study
        self.picture_of = lru_cache(maxsize=None)(make_picture)
        self.mask_of = lru_cache(maxsize=None)(make_mask)
        self.places = asyncio.Semaphore(study.max_concurrency)

    async def check(self) -> None:
        try:
            answer = await self.client.get("/v1/models")
        except httpx.TransportError as failed:
            raise ServeError(f"{self.client.base_url} cannot be reached: {failed}") from None
        if answer.status_code != 200:
            raise ServeError(f"{self.client.base_url} answers {answer.status_code}: {error_text(answer)}")

    async def num_interruptions(self) -> int | None:
        """Return the interruptions of all step loops so far."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith(INTERRUPTIONS)]
        return int(sum(counts)) if counts else None

    async def register(self, template: Arrival) -> None:
        """Register a template and wait for it, as a service does with the pictures it offers. A server that keeps no
        activations refuses, which is no error."""
        picture = self.picture_of(template.template, template.size)
        answer = await self.client.post("/v1/templates", files={"image": picture}, data=fields_of(template))
        if answer.status_code != 201:
            return
        name = answer.json()["id"]
        for _ in range(int(TIMEOUT * 10)):
            status = await self.client.get(f"/v1/templates/{name}")
            if status.status_code != 200 or status.json()["state"] in ("ready", "failed"):
                return
            await asyncio.sleep(0.1)

    async def alone(self, templates: Sequence[Arrival], like: Arrival | None = None) -> float:
        """Return the mean latency of edits on the idle server, with the mask of one edit or with an average mask."""
        ratio = like.mask_ratio if like else statistics.median(arrival.mask_ratio for arrival in self.study.workload)
        chosen = (templates[index % len(templates)] for index in range(NUM_ALONE + 1))
        arrivals = [replace(arrival, mask_ratio=ratio) for arrival in chosen]
        if not self.study.registers:  # pictures that the load does not have
            arrivals = [replace(arrival, template=FIRST_OTHER + index) for index, arrival in enumerate(arrivals)]
        answers = [await self.edit(arrival) for arrival in arrivals]
        if answers[-1].error:
            raise ServeError(f"an edit failed: {answers[-1].error}")
        return statistics.mean(answer.latency for answer in answers[1:])  # the first warms up

    def draw_masks(self) -> None:
        """Draw all masks ahead, because drawing takes longer than the gap between some edits."""
        for arrival in self.study.workload:
            self.mask_of(arrival.mask_ratio, arrival.mask_shape, arrival.seed, arrival.size)

    async def run(self, on_answer: Callable[[], None]) -> list[EditAnswer]:
        start = time.perf_counter()

        async def send(arrival: Arrival) -> EditAnswer:
            await asyncio.sleep(arrival.at - (time.perf_counter() - start))
            arrived = time.perf_counter()
            async with self.places:
                answer = await self.edit(arrival, arrived)
            on_answer()
            return answer

        return list(await asyncio.gather(*(send(arrival) for arrival in self.study.workload)))

    async def edit(self, arrival: Arrival, arrived: float | None = None) -> EditAnswer:
        """Send an edit. Its latency counts from the arrival and includes the wait for a free connection."""
        files = {
            "image": self.picture_of(arrival.template, arrival.size),
            "mask": self.mask_of(arrival.mask_ratio, arrival.mask_shape, arrival.seed, arrival.size),
        }
        fields = fields_of(arrival) | {"prompt": "a photo of a flower", "seed": str(arrival.seed)}
        start = time.perf_counter() if arrived is None else arrived
        deadline = (self.study.deadlines or {}).get(kind_of(arrival))
        if deadline is not None and arrived is not None:
            fields["deadline_ms"] = str(max(round(1000 * deadline), 1))
        try:
            answer = await self.client.post("/v1/images/edits", files=files, data=fields)
        except httpx.TransportError as failed:
            return EditAnswer(
                time.perf_counter() - start, arrival.mask_ratio, str(failed) or type(failed).__name__, deadline
            )
        error = "" if answer.status_code == 200 else f"{answer.status_code} {error_text(answer)}"
        return EditAnswer(time.perf_counter() - start, arrival.mask_ratio, error, deadline)


def fields_of(arrival: Arrival) -> dict[str, str]:
    return {} if arrival.steps is None else {"num_inference_steps": str(arrival.steps)}


def error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def make_row(system: str, answers: Sequence[EditAnswer], duration: float, alone: float, slo_scale: float) -> ServeRow:
    finished = [answer for answer in answers if not answer.error]
    latencies = [answer.latency for answer in finished] or [float("nan")]
    in_time = sum(answer.latency <= (answer.deadline or slo_scale * alone) for answer in finished)
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
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
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

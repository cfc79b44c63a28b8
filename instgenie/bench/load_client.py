"""A client that sends edits to a server over HTTP and notes how each went, and servers that are started for it."""

import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import httpx

from instgenie.bench.pictures import make_mask, make_picture
from instgenie.bench.workload import Arrival
from instgenie.errors import ServeError
from instgenie.telemetry.progress import Progress, show_status

NUM_ALONE = 3
TIMEOUT = 1800.0
INTERRUPTIONS = "instgenie:step_loop_interruptions_total{"


@dataclass(frozen=True)
class EditAnswer:
    """The answer to one edit, as its client saw it."""

    latency: float
    mask_ratio: float
    error: str  # empty: none
    facts: dict[str, Any] | None = None  # what the server says about the edit; None: it failed


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


def host_text() -> str:
    """This machine, on which the client and the servers that it starts run."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def http_client(base_url: str, api_key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False)


def templates_of(workload: Sequence[Arrival]) -> list[Arrival]:
    """One edit of every picture, size and number of steps."""
    first = {(arrival.template, arrival.size, arrival.steps): arrival for arrival in reversed(workload)}
    return list(first.values())


picture_of = lru_cache(maxsize=None)(make_picture)
mask_of = lru_cache(maxsize=None)(make_mask)


def draw_masks(workload: Sequence[Arrival]) -> None:
    """Draw all masks ahead, because drawing takes longer than the gap between some edits."""
    for arrival in workload:
        mask_of(arrival.mask_ratio, arrival.mask_shape, arrival.seed, arrival.size)


class LoadClient:
    """Registers templates and sends the edits of a workload."""

    def __init__(self, client: httpx.AsyncClient, max_concurrency: int = 256) -> None:
        self.client = client
        self.places = asyncio.Semaphore(max_concurrency)

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
        picture = picture_of(template.template, template.size)
        answer = await self.client.post("/v1/templates", files={"image": picture}, data=fields_of(template))
        if answer.status_code != 201:
            return
        name = answer.json()["id"]
        for _ in range(int(TIMEOUT * 10)):
            status = await self.client.get(f"/v1/templates/{name}")
            if status.status_code != 200 or status.json()["state"] in ("ready", "failed"):
                return
            await asyncio.sleep(0.1)

    async def register_all(self, templates: Sequence[Arrival], progress: Progress, title: str) -> None:
        task = progress.add(title, len(templates))
        for template in templates:
            await self.register(template)
            task.advance()

    async def alone(self, templates: Sequence[Arrival], mask_ratio: float) -> float:
        """Return the mean latency of edits on the idle server, all with masks of one size."""
        chosen = (templates[index % len(templates)] for index in range(NUM_ALONE + 1))
        answers = [await self.edit(replace(arrival, mask_ratio=mask_ratio)) for arrival in chosen]
        if answers[-1].error:
            raise ServeError(f"an edit failed: {answers[-1].error}")
        return statistics.mean(answer.latency for answer in answers[1:])  # the first warms up

    async def run(
        self,
        workload: Sequence[Arrival],
        deadlines: Sequence[float] | None = None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> list[EditAnswer]:
        """Send each edit when it arrives, with the deadlines that requests give, if any."""
        start = time.perf_counter()

        async def send(arrival: Arrival, deadline: float | None) -> EditAnswer:
            await asyncio.sleep(arrival.at - (time.perf_counter() - start))
            arrived = time.perf_counter()
            async with self.places:
                answer = await self.edit(arrival, deadline, arrived)
            on_answer()
            return answer

        given: Sequence[float | None] = deadlines or [None] * len(workload)
        return list(await asyncio.gather(*(send(*pair) for pair in zip(workload, given, strict=True))))

    async def edit(self, arrival: Arrival, deadline: float | None = None, arrived: float | None = None) -> EditAnswer:
        """Send an edit. Its latency counts from the arrival and includes the wait for a free connection."""
        files = {
            "image": picture_of(arrival.template, arrival.size),
            "mask": mask_of(arrival.mask_ratio, arrival.mask_shape, arrival.seed, arrival.size),
        }
        fields = fields_of(arrival) | {"prompt": "a photo of a flower", "seed": str(arrival.seed)}
        start = time.perf_counter() if arrived is None else arrived
        if deadline is not None:
            fields["deadline_ms"] = str(max(round(1000 * deadline), 1))
        ratio = arrival.mask_ratio
        try:
            answer = await self.client.post("/v1/images/edits", files=files, data=fields)
        except httpx.TransportError as failed:
            return EditAnswer(time.perf_counter() - start, ratio, str(failed) or type(failed).__name__)
        seconds = time.perf_counter() - start
        if answer.status_code != 200:
            return EditAnswer(seconds, ratio, f"{answer.status_code} {error_text(answer)}")
        [facts] = answer.json()["data"]
        del facts["b64_json"]
        return EditAnswer(seconds, ratio, "", facts)


def fields_of(arrival: Arrival) -> dict[str, str]:
    return {} if arrival.steps is None else {"num_inference_steps": str(arrival.steps)}


def error_text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]

"""Shows how far the processes of the workers have loaded their weights, while a server starts: bars in a terminal, log
lines elsewhere."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from instgenie.cluster.cluster import Cluster, loading_bytes
from instgenie.server.monitoring.log import say
from instgenie.telemetry.progress import ByteTasks, Progress, has_screen

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LINES = 5.0
MIN_BYTES = 10**9  # of weights that are worth a bar


@contextmanager
def showing(cluster: Cluster) -> Iterator[None]:
    console = Console(stderr=True)
    task = asyncio.create_task(draw(cluster, console) if has_screen(console) else write(cluster))
    try:
        yield
    finally:
        task.cancel()


async def draw(cluster: Cluster, console: Console) -> None:
    with Progress(console, transient=True) as progress:
        tasks = ByteTasks(progress)
        while True:
            for name, (done, total) in large(cluster).items():
                tasks.update(f"loading {name}", done, total)
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


async def write(cluster: Cluster) -> None:
    """Write a line for a process when its weights are loaded, and before that now and then."""
    written: dict[str, tuple[float, bool]] = {}  # by process: when, and whether it was done
    now = asyncio.get_running_loop().time

    def look() -> None:
        for name, (done, total) in loading_bytes(cluster).items():
            at, was_done = written.setdefault(name, (now(), False))
            is_done = done == total
            if not was_done and (is_done or now() - at > SECONDS_BETWEEN_LINES):
                written[name] = now(), is_done
                say("loading", worker_process=name, gigabytes=round(done / 1e9, 3), of=round(total / 1e9, 3))

    try:
        while True:
            look()
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        look()


def large(cluster: Cluster) -> dict[str, tuple[int, int]]:
    return {name: counts for name, counts in loading_bytes(cluster).items() if counts[1] >= MIN_BYTES}

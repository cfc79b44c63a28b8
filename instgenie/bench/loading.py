"""The time to load a pipeline's folder, beside diffusers and beside what the disk and the bus allow. Each way to load
runs in a process of its own, with the files in the page cache and, if asked for, after they were dropped from it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.load_client import started
from instgenie.errors import ModelError
from instgenie.telemetry.progress import show_status

Pages = Literal["warm", "cold"]

WIDTH = 120  # of the table
WAYS = ("read", "copy", "instgenie", "diffusers")
COLD_WAYS = ("read", "instgenie", "diffusers")
ABOUT = {
    "read": "floor: read the files, 8 threads",
    "copy": "floor: copy from locked memory",
    "instgenie": "instgenie",
    "instgenie fp8": "instgenie, weights in fp8",
    "diffusers": "diffusers, from_pretrained().to()",
    "diffusers mapped": "diffusers, device_map",
    "serve": "instgenie serve, to /ready",
}


@dataclass(frozen=True)
class LoadStudy:
    folder: Path
    device: str
    dtype: str = "auto"
    ways: tuple[str, ...] = WAYS
    cold: bool = False
    serves: bool = False


@dataclass(frozen=True)
class LoadTime:
    """What one way to load took."""

    way: str
    pages: Pages
    seconds: float
    process_seconds: float = 0.0  # with imports and the start of the device
    peak_rss: int = 0  # bytes of main memory, pages of mapped files among them
    peak_device: int = 0


def bench_loading(study: LoadStudy, json_path: Path | None = None) -> None:
    check_folder(json_path)
    num_bytes = weights_bytes(study.folder)
    loadings: list[LoadTime] = []
    rounds: dict[Pages, tuple[str, ...]] = {"warm": study.ways, "cold": COLD_WAYS if study.cold else ()}
    for pages, ways in rounds.items():
        for way in ways:
            with show_status(f"{pages}: {ABOUT[way]}"):
                if pages == "cold":
                    drop_pages(study.folder)
                elif not loadings:
                    load_once("read", pages, study)  # fills the page cache
                loadings.append(load_once(way, pages, study))
    if study.serves:
        loadings.append(time_server(study))
    Console(width=WIDTH).print(make_table(loadings, num_bytes, study))
    if json_path:
        rows = [vars(one) for one in loadings]
        about = {"folder": study.folder.name, "device": study.device, "bytes": num_bytes}
        write_json(about | {"rows": rows}, json_path)


def weights_bytes(folder: Path) -> int:
    files = list(folder.rglob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors weights")
    return sum(path.stat().st_size for path in files)


def load_once(way: str, pages: Pages, study: LoadStudy) -> LoadTime:
    command = [sys.executable, "-m", "instgenie.bench.load_once", way, str(study.folder), study.device, study.dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"{ABOUT[way]} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else ''}")
    return LoadTime(way, pages, **json.loads(done.stdout.strip().splitlines()[-1]))


def time_server(study: LoadStudy) -> LoadTime:
    """Seconds from the start of the command to the first answer that it is ready."""
    start = time.perf_counter()
    with started(str(study.folder), study.device, 64, ("--dtype", study.dtype)):
        seconds = time.perf_counter() - start
    return LoadTime("serve", "warm", seconds, seconds)


def drop_pages(folder: Path) -> None:
    """Drop the files from the page cache, as far as the system follows such advice."""
    for path in folder.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)  # only clean pages are dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def make_table(loadings: Sequence[LoadTime], num_bytes: int, study: LoadStudy) -> Table:
    title = f"{study.folder.name}: {num_bytes / 1e9:.2f} GB of weights, {study.device}"
    table = Table("way", "page cache", "s", "GB/s", "s of process", "main memory GB", "device GB", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for one in loadings:
        memory = [f"{size / 1e9:.2f}" if size else "" for size in (one.peak_rss, one.peak_device)]
        rate = f"{num_bytes / 1e9 / max(one.seconds, 1e-9):.2f}"
        table.add_row(ABOUT[one.way], one.pages, f"{one.seconds:.2f}", rate, f"{one.process_seconds:.1f}", *memory)
    return table

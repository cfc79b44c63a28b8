"""One way to get weights to a device, timed in a process of its own: `python -m instgenie.bench.load_once WAY FOLDER
DEVICE DTYPE`. Prints what it took as JSON.

| way | what it does |
|---|---|
| read | reads the files into memory that is used again and again, with several threads: no way to load is faster |
| copy | copies as many bytes from page-locked memory to the device: no way to load is faster |
| instgenie | `load` |
| instgenie fp8 | `load` with large weights in one byte each |
| diffusers | `from_pretrained(...).to(device)` |
| diffusers mapped | `from_pretrained(..., device_map=device)` |
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()  # torch is imported later

import diffusers  # noqa: E402
import torch  # noqa: E402

from instgenie.machine.device import choose_device, choose_dtype  # noqa: E402
from instgenie.machine.pages import lock_pages  # noqa: E402
from instgenie.models.loading.load import load  # noqa: E402

NUM_THREADS = 8
BUFFER_BYTES = 16 * 2**20
COPY_BYTES = 2**28


def read_files(folder: Path) -> None:
    """Read every weights file, in pieces that threads share."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*.safetensors")}
    pieces = [(path, first) for path, size in sizes.items() for first in range(0, size, BUFFER_BYTES)]
    buffers = [bytearray(BUFFER_BYTES) for _ in range(NUM_THREADS)]

    def read(number: int) -> None:
        files = {path: os.open(path, os.O_RDONLY) for path in sizes}
        for path, first in pieces[number::NUM_THREADS]:
            os.preadv(files[path], [buffers[number]], first)
        for file in files.values():
            os.close(file)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(read, range(NUM_THREADS)))


def copy_bytes(num_bytes: int, device: torch.device) -> None:
    memory = lock_pages(COPY_BYTES) if device.type == "cuda" else torch.ones(COPY_BYTES, dtype=torch.uint8)
    place = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    place.copy_(memory)
    wait(device)
    start = time.perf_counter()
    num_copies = 8
    for _ in range(num_copies):
        place.copy_(memory, non_blocking=True)
    wait(device)
    seconds = (time.perf_counter() - start) * num_bytes / (num_copies * COPY_BYTES)
    report(seconds, device)
    sys.exit()


def report(seconds: float, device: torch.device) -> None:
    told = {
        "seconds": seconds,
        "process_seconds": time.perf_counter() - STARTED,
        "peak_rss": peak_memory(),
        "peak_device": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    }
    print(json.dumps(told))


def peak_memory() -> int:
    """Of this program; what getrusage tells may be its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(way: str, folder: str, device_name: str, dtype_name: str) -> None:
    device = choose_device(device_name)
    dtype = choose_dtype(dtype_name, device)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context of the process
    stock = diffusers.DiffusionPipeline.from_pretrained
    ways: dict[str, Callable[[], Any]] = {
        "read": lambda: read_files(Path(folder)),
        "copy": lambda: copy_bytes(num_bytes, device),
        "instgenie": lambda: load(folder, device_name, dtype_name),
        "instgenie fp8": lambda: load(folder, device_name, dtype_name, weights_dtype="fp8"),
        "diffusers": lambda: stock(folder, torch_dtype=dtype).to(device),
        "diffusers mapped": lambda: stock(folder, torch_dtype=dtype, device_map=device.type),
    }
    start = time.perf_counter()
    loaded = ways[way]()
    wait(device)
    report(time.perf_counter() - start, device)
    del loaded


if __name__ == "__main__":
    main(*sys.argv[1:])

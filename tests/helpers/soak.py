"""Runs many edits of many pictures on one server and watches the memory of all its processes. From the root of the
repository:

    PYTHONPATH=tests python -m helpers.soak --num-edits 2000 --num-pictures 300 [--device cuda] [--plot soak.svg]

The cache is made small enough to be full after the first 300 edits; from then on the memory of every process must stay
flat, and no edit may fail.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil

from helpers.serving import Running, alpha_png, png, running_server
from instgenie.pictures.mask import box_mask

NUM_WARM_UP = 300  # edits after which nothing grows any more
GROWTH = 32  # MiB by which a flat process may differ between its first and its last windows
WINDOW = 100  # edits per row


@dataclass
class Soak:
    server: Running
    num_pictures: int
    side: int
    steps: int
    seed: int
    statuses: Counter[str] = field(default_factory=Counter)
    windows: list[dict[str, float]] = field(default_factory=list)  # MiB per process, at the end of each window

    def run(self, num_edits: int, concurrency: int) -> None:
        draw = random.Random(self.seed)
        for first in range(0, num_edits, WINDOW):
            edits = [(draw.randrange(self.num_pictures), draw.random()) for _ in range(min(WINDOW, num_edits - first))]
            started = time.monotonic()
            with ThreadPoolExecutor(concurrency) as pool:
                for status in pool.map(lambda edit: self.edit(*edit), edits):
                    self.statuses[status] += 1
            self.windows.append(memory_of(self.server))
            self.report(first + len(edits), time.monotonic() - started)

    def edit(self, index: int, chance: float) -> str:
        picture, masked = self.picture(index), self.mask(chance)
        fields = {"prompt": "a red flower", "num_inference_steps": str(self.steps), "seed": str(index)}
        answer = self.client().post("/v1/images/edits", files={"image": picture, "mask": masked}, data=fields)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.json()['error']['code']}"
        return str(answer.json()["data"][0]["cache_tier"])

    def client(self) -> httpx.Client:
        if not hasattr(LOCAL, "client"):
            LOCAL.client = httpx.Client(base_url=self.server.url, timeout=600, trust_env=False)
        client: httpx.Client = LOCAL.client
        return client

    def picture(self, index: int) -> bytes:
        """A smooth picture that no other index has."""
        rows, columns = np.mgrid[0 : self.side, 0 : self.side] / self.side
        waves = [np.sin(6.28 * (rows * (index % 7 + k) + columns * (index // 7 % 9) + index / 300)) for k in range(3)]
        return png((np.stack(waves, -1) * 127 + 128).astype(np.uint8))

    def mask(self, chance: float) -> bytes:
        edge = int(self.side * (0.2 + 0.4 * chance))
        left = int((self.side - edge) * chance)
        return alpha_png(box_mask((left, left, edge, edge), (self.side, self.side)))

    def report(self, num_edits: int, seconds: float) -> None:
        window = self.windows[-1]
        if len(self.windows) == 1:
            print(f"{'edits':>6} {'s/edit':>7}  " + " ".join(f"{name:>10}" for name in window) + "  (MiB)")
        rows = " ".join(f"{window.get(name, 0):>10.0f}" for name in self.windows[0])
        print(f"{num_edits:>6} {seconds / WINDOW:>7.2f}  {rows}  {dict(self.statuses)}", flush=True)

    def growth(self) -> dict[str, float]:
        """MiB by which each process grew: the mean of the last three windows against the three after the warm-up."""
        flat = self.windows[NUM_WARM_UP // WINDOW :]
        if len(flat) < 6:
            return {}
        return {name: mean(flat[-3:], name) - mean(flat[:3], name) for name in flat[0]}


LOCAL = threading.local()


def mean(windows: Sequence[dict[str, float]], name: str) -> float:
    return sum(window[name] for window in windows) / len(windows)


def memory_of(server: Running) -> dict[str, float]:
    """MiB of resident memory, by role and worker."""
    found = {"http": resident(psutil.Process(server.process.pid))}
    counts: Counter[str] = Counter()
    for child in sorted(psutil.Process(server.process.pid).children(recursive=True), key=lambda child: child.pid):
        role = role_of(child)
        found[f"{role}{counts[role]}"] = resident(child)
        counts[role] += 1
    return found


def role_of(process: psutil.Process) -> str:
    return process.name().removeprefix("genie-")


def resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def draw_plot(windows: Sequence[dict[str, float]], path: Path) -> None:
    """Draw the memory of each process over the edits."""
    width, height, top = 640, 240, max(max(window.values()) for window in windows)
    colours = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#4b5563")
    lines = []
    for number, name in enumerate(windows[0]):
        points = " ".join(
            f"{40 + index * (width - 160) / max(len(windows) - 1, 1):.1f},"
            f"{height - 20 - window[name] / top * (height - 40):.1f}"
            for index, window in enumerate(windows)
        )
        colour = colours[number % len(colours)]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{name} {windows[-1][name]:.0f} MiB"
        lines.append(f'<text x="{width - 110}" y="{20 + 16 * number}" fill="{colour}" font-size="12">{label}</text>')
    body = "".join(lines)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{body}</svg>\n')


def main() -> int:
    parser = argparse.ArgumentParser(description="Run many edits and watch the memory of all processes.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--num-edits", type=int, default=2000)
    parser.add_argument("--num-pictures", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--host-cache-gib", default="0.1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--host-cache-gib",
            options.host_cache_gib,
            "--cache-dir",
            f"{folder}/cache",
            "--disk-cache-gib",
            "0.5",
        ]
        flags += ["--workers", options.workers]
        with running_server(Path(folder), options.model, *flags, device=options.device) as server:
            soak = Soak(server, options.num_pictures, options.side, options.steps, options.seed)
            soak.run(options.num_edits, options.concurrency)
    if options.plot:
        draw_plot(soak.windows, options.plot)
    growth = soak.growth()
    print("growth after the warm-up, MiB:", {name: round(value, 1) for name, value in growth.items()})
    failed = sum(num for status, num in soak.statuses.items() if status[0].isdigit())
    return int(failed > 0 or max(growth.values(), default=0.0) > GROWTH)


if __name__ == "__main__":
    sys.exit(main())

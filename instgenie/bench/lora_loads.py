"""What LoRAs that are not in memory cost: one large file from a cold disk, and many small ones in rotation under load.

    python -m instgenie.bench.lora_loads --model dummy:sdxl-base-1.0 --num-loras 1000 --seconds 20

The first part is an edit of 28 steps whose LoRA is on disk and not in the page cache, against the same edit with the
LoRA in memory. The second sends edits at random times at a share of the rate that full batches without LoRAs reach:
once without LoRAs, and once with one of many each, drawn evenly; then again with LoRAs, at the same share of the rate
that full batches with LoRAs reach. Most LoRAs come from disk, through memory of the default size. The files are links
to one, so that they need little room; each is read, copied and kept as a LoRA of its own.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from instgenie.adapters.tiers import LoraFetch
from instgenie.bench.adapter_files import write_loras
from instgenie.bench.lora_steps import NETWORK_ALONE, make_jobs, make_loras, step_seconds
from instgenie.cluster.config import LoraConfig
from instgenie.engine.adapting import JobLoras, make_tiers
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import Graphs, make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.merging import Merging
from instgenie.jobs.job import Job
from instgenie.machine.clock import now
from instgenie.machine.cores import switch_threads_soon
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.types import LoraUse

COLD_STEPS, LOAD_STEPS = 28, 12
COLD_BYTES = 200e6
SMALL_RANK = 16
MAX_JOBS = 8
LOAD = 0.8  # of the rate of full batches
PAUSE = 0.0005  # seconds between looks at an empty queue


@dataclass(eq=False)
class Loop:
    """Steps of jobs whose LoRAs come meanwhile, as a worker takes them."""

    model: Model
    graphs: Graphs | None
    weights_bytes: int = 0  # for weights with LoRAs merged into them

    def __post_init__(self) -> None:
        self.config = LoraConfig()
        self.tiers = make_tiers(self.model, self.config.host_bytes, self.config.gpu_bytes)
        self.job_loras = JobLoras(self.model, self.tiers)
        copying = Copying(self.weights_bytes)
        self.engine = Engine(self.model, MAX_JOBS, graphs=self.graphs, merging=Merging(False), copying=copying)
        self.waiting: dict[Job, LoraFetch] = {}

    def join(self, job: Job, use: LoraUse | None) -> LoraFetch | None:
        fetch = self.tiers.fetch([use]) if use else None
        if fetch:
            self.waiting[job] = fetch
        self.engine.join(job)
        return fetch

    def step(self) -> list[Job]:
        """Take a step. Returns the jobs that are done."""
        for job, fetch in list(self.waiting.items()):
            job.is_held = not fetch.is_done and job.step >= self.config.num_free_steps(job.num_steps)
            if fetch.is_done:
                self.job_loras.give(job, self.waiting.pop(job))
        if all(job.is_held for job in self.engine.jobs):
            time.sleep(PAUSE)
            return []
        before = list(self.engine.jobs)
        self.engine.step()
        now(self.model.device)
        return [job for job in before if job not in self.engine.jobs]


def run_one(loop: Loop, job: Job, use: LoraUse) -> float:
    """Seconds of an edit's steps."""
    start = now(loop.model.device)
    fetch = loop.join(job, use)
    while loop.engine.jobs:
        loop.step()
    seconds = now(loop.model.device) - start
    assert fetch
    loop.tiers.release(fetch)
    return seconds


def measure_cold(model: Model, job: Job, num_repeats: int) -> str:
    """An edit with a large LoRA from disk against one with it in memory."""
    per_rank = sum(2 * one.numel() for one in lora_tensors(model, 1))
    rank = max(round(COLD_BYTES / per_rank / 8), 1) * 8
    graphs = make_graphs(model)
    found: dict[str, list[float]] = {"near": [], "cold": []}
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder:
        [path] = write_loras(Path(folder), model, rank, 1)
        use = LoraUse("large", 1.0, str(path), "large", path.stat().st_size)
        for number in range(num_repeats + 1):
            for where, own in found.items():
                loop = Loop(model, graphs)
                if where == "near":
                    loop.tiers.fetch([use]).result()
                else:
                    forget(path)
                seconds = run_one(loop, replace(job), use)
                loop.tiers.close()
                if number:  # the first captures passes
                    own.append(seconds)
        num_bytes = path.stat().st_size
    near, cold = (statistics.median(own) for own in found.values())
    return (
        f"an edit of {job.num_steps} steps with a LoRA of {num_bytes / 1e6:.0f} MB (rank {rank}): {near:.3f} s with it "
        f"in memory, {cold:.3f} s from a cold disk: {cold - near:+.3f} s"
    )


def lora_tensors(model: Model, rank: int) -> list[torch.Tensor]:
    """Tensors of a LoRA for all linear layers of blocks, without values."""
    layers = [layer for name, layer in model.network.named_modules() if "blocks" in name]
    linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    widths = [width for layer in linear for width in (layer.in_features, layer.out_features)]
    return [torch.empty(rank, width, device="meta") for width in widths]


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def measure_rotation(model: Model, job: Job, num_loras: int, seconds: float, weights_bytes: int = 0) -> str:
    """P95 of edits with LoRAs in rotation against that of edits without, at the same times, and at times that are as
    much further apart as full batches with LoRAs take longer."""
    jobs = [replace(job) for _ in range(MAX_JOBS)]
    plain_step = step_seconds(model, jobs, [None] * MAX_JOBS, merges=False)
    loras = make_loras(model, SMALL_RANK, MAX_JOBS)
    slower = step_seconds(model, jobs, loras, merges=False, copying=Copying(weights_bytes)) / plain_step
    del loras
    rate = LOAD * MAX_JOBS / (job.num_steps * plain_step)
    random = np.random.default_rng(0)
    num = max(math.ceil(rate * seconds), 2)
    times = np.cumsum(random.exponential(1 / rate, num)).tolist()
    chosen = random.integers(num_loras, size=num)
    graphs = make_graphs(model)
    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder:
        [path] = write_loras(Path(folder), model, SMALL_RANK, 1)
        uses = []
        for number in range(num_loras):
            link = Path(folder) / f"{number}.safetensors"
            os.link(path, link)
            uses.append(LoraUse(link.stem, 1.0, str(link), link.stem, path.stat().st_size))
        none: list[LoraUse | None] = [None] * num
        rotated: list[LoraUse | None] = [uses[one] for one in chosen]
        latencies = []
        for own in (none, rotated):
            capture(Loop(model, graphs, weights_bytes), job, own[:MAX_JOBS])
            latencies.append(run_load(Loop(model, graphs, weights_bytes), job, times, own))
        later = [slower * one for one in times]
        latencies.append(run_load(Loop(model, graphs, weights_bytes), job, later, rotated))
        num_bytes = path.stat().st_size
    plain, adapted, own_load = (float(np.percentile(own, 95)) for own in latencies)
    return (
        f"{num} edits of {job.num_steps} steps at {rate:.2f} a second ({LOAD:.0%} of full batches): P95 {plain:.2f} s "
        f"without LoRAs, {adapted:.2f} s with {num_loras:,} of {num_bytes / 1e6:.0f} MB in rotation: "
        f"{adapted / plain:.2f} times; {own_load:.2f} s at {rate / slower:.2f} a second ({LOAD:.0%} of full batches "
        f"with LoRAs, whose steps take {slower:.2f} times as long): {own_load / plain:.2f} times"
    )


def capture(loop: Loop, job: Job, uses: Sequence[LoraUse | None]) -> None:
    """Take steps with batches of all sizes, with another LoRA for each edit from the first step, so that passes are
    captured."""
    for use in filter(None, uses):
        loop.tiers.fetch([use]).result()
    for num_jobs in range(1, len(uses) + 1):
        fetches = [loop.join(replace(job), use) for use in uses[:num_jobs]]
        for _ in range(3):
            loop.step()
        for one in list(loop.engine.jobs):
            loop.engine.leave(one)
        for fetch in filter(None, fetches):
            loop.tiers.release(fetch)
    loop.tiers.close()


def run_load(loop: Loop, job: Job, times: Sequence[float], uses: Sequence[LoraUse | None]) -> list[float]:
    """Seconds of each edit from its arrival to its last step. LoRAs begin to load when an edit arrives."""
    arrived: dict[Job, float] = {}
    fetches: dict[Job, LoraFetch] = {}
    queue: list[tuple[Job, LoraUse | None]] = []
    latencies: list[float] = []
    start, coming = time.perf_counter(), list(zip(times, uses, strict=True))
    while coming or queue or loop.engine.jobs:
        present = time.perf_counter() - start
        while coming and coming[0][0] <= present:
            at, use = coming.pop(0)
            one = replace(job)
            arrived[one] = at
            queue.append((one, use))
            if use:
                loop.tiers.warm([use])
        while queue and len(loop.engine.jobs) < MAX_JOBS:
            one, use = queue.pop(0)
            fetch = loop.join(one, use)
            if fetch:
                fetches[one] = fetch
        if not loop.engine.jobs:
            time.sleep(PAUSE)
            continue
        for one in loop.step():
            latencies.append(time.perf_counter() - start - arrived.pop(one))
            if one in fetches:
                loop.tiers.release(fetches.pop(one))
    loop.tiers.close()
    return latencies


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="what LoRAs that are not in memory cost")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-loras", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which edits arrive, without LoRAs and with")
    parser.add_argument("--repeats", type=int, default=3)
    about_weights = "GiB for weights with the LoRAs of an edit merged into them, in the second part"
    parser.add_argument("--lora-weights-gib", type=float, default=0.0, metavar="GIB", help=about_weights)
    parser.add_argument("--dense", action="store_true", help="edits compute every token, instead of reading a template")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    switch_threads_soon()  # as a worker does
    with torch.inference_mode():
        model = load(options.model, options.device, weights=NETWORK_ALONE)
        kind = "dense" if options.dense else "cached"
        [cold] = make_jobs(model, 1, (kind,), COLD_STEPS)[kind]
        print(measure_cold(model, cold, options.repeats), flush=True)
        [loaded] = make_jobs(model, 1, (kind,), LOAD_STEPS)[kind]
        weights_bytes = round(options.lora_weights_gib * 2**30)
        print(measure_rotation(model, loaded, options.num_loras, options.seconds, weights_bytes), flush=True)
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

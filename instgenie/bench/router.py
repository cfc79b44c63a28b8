"""The time that the router takes to choose a worker, alone and within a front. Imports no torch: routing is arithmetic
in the HTTP process. Times are seconds of CPU, so that other work on the machine does not count."""

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from instgenie.bench.files import check_folder, write_json
from instgenie.bench.front import measure_front
from instgenie.cost.latency import DEFAULTS
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.cost.pricing import JobShape, make_costs
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.router import Router, Work, WorkerLoad
from instgenie.types import TierName

NUM_WORKERS = (1, 8, 64, 256, 1024, 4096, 20_000)
BATCH_SIZE = 8
NUM_TOKENS = 4096
TIERS = tuple(enumerate(get_args(TierName)))  # every worker has a template in each
BLOCK = BlockShape(per_token=2 * 12 * 3072**2, per_text=2 * 12 * 3072**2, per_rest=0, per_pair=4 * 3072, per_branch=0,
                   width=3072, joint=True)  # fmt: skip
SHAPE = JobShape(NetworkShape((BLOCK,) * 57, (57,), per_token=0, per_branch=0), num_text=512)  # about FLUX.1-dev


def bench_router(repeats: int, json_path: Path | None = None) -> None:
    """Print the milliseconds of a choice by policy, and of what a front does besides."""
    check_folder(json_path)
    report: list[dict[str, object]] = []

    def add(table: Table, what: str, num_workers: int, seconds: Sequence[float]) -> None:
        ordered = sorted(1000 * one for one in seconds)
        p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
        figures = {"median_ms": statistics.median(ordered), "p99_ms": p99}
        table.add_row(what, f"{num_workers:,}", *(f"{ms:.3f}" for ms in figures.values()))
        report.append({"what": what, "num_workers": num_workers} | figures)

    by_policy = Table("policy", "workers", "median ms", "p99 ms", title=f"the router alone, {repeats:,} choices each")
    for policy in get_args(RoutingPolicy):
        for num_workers in NUM_WORKERS:
            add(by_policy, policy, num_workers, list(decide(policy, num_workers, repeats)))
    Console().print(by_policy)
    front = Table("in a front", "workers", "median ms", "p99 ms", title=f"mask_aware, {repeats:,} times each")
    for num_workers in NUM_WORKERS:
        times = measure_front(num_workers, repeats)
        add(front, "choosing a worker", num_workers, times.decision)
        add(front, "accepting an edit", num_workers, times.accepting)
        add(front, "a step of a batch of 8", num_workers, times.step)
    Console().print(front)
    if json_path:
        write_json({"repeats": repeats, "rows": report}, json_path)


def decide(policy: RoutingPolicy, num_workers: int, repeats: int) -> Iterator[float]:
    """Yield the seconds of each decision. Each chosen worker gets the edit, and the oldest edit leaves."""
    random.seed(0)
    router = Router(policy)
    costs = make_costs(SHAPE, DEFAULTS["cuda"], "exact", NUM_TOKENS)
    loads = [
        WorkerLoad(worker, BATCH_SIZE, costs=costs, templates={str((worker + rank) % 16): tier for rank, tier in TIERS})
        for worker in range(num_workers)
    ]
    places: deque[tuple[str, int]] = deque()
    for index in range(repeats + 2 * BATCH_SIZE * num_workers):
        work = Work(28, NUM_TOKENS, random.randint(100, 2000), template=str(random.randrange(16)))
        is_filled = index >= 2 * BATCH_SIZE * num_workers  # every worker has a batch and a queue
        start = time.thread_time()
        worker = router.choose(work, loads) if is_filled else index % num_workers
        seconds = time.thread_time() - start
        load = loads[worker]
        load.add(str(index), work.num_steps, load.tokens_of(work), load.price_of(work))
        places.append((str(index), worker))
        if is_filled:
            edit, other = places.popleft()
            loads[other].remove(edit)
            yield seconds

"""How long the router takes to choose a worker. Imports no torch: a choice is arithmetic in the HTTP process."""

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import get_args

from rich.console import Console
from rich.table import Table

from instgenie.router import Load, Policy, Router, Work

NUM_WORKERS = (8, 64, 1024, 20_000)
BATCH_SIZE = 8


def bench_router(repeats: int) -> None:
    table = Table("policy", "workers", "median ms", "p99 ms", "max ms", title=f"{repeats} decisions each")
    for policy in get_args(Policy):
        for num_workers in NUM_WORKERS:
            times = sorted(1000 * seconds for seconds in decide(policy, num_workers, repeats))
            p99 = times[min(int(0.99 * len(times)), len(times) - 1)]
            numbers = (f"{ms:.3f}" for ms in (statistics.median(times), p99, times[-1]))
            table.add_row(policy, f"{num_workers}", *numbers)
    Console().print(table)


def decide(policy: Policy, num_workers: int, repeats: int) -> Iterator[float]:
    """Seconds of each decision; every one adds to a load, and old edits leave."""
    random.seed(0)
    router = Router(policy)
    loads = [Load(worker, BATCH_SIZE, templates={str(worker % 16): "host"}) for worker in range(num_workers)]
    places: deque[tuple[str, int]] = deque()
    for index in range(repeats + 2 * BATCH_SIZE * num_workers):
        work = Work(28, 4096, random.randint(100, 2000), template=str(random.randrange(16)))
        is_filled = index >= 2 * BATCH_SIZE * num_workers  # every worker has a batch and a queue
        start = time.perf_counter()
        worker = router.choose(work, loads) if is_filled else index % num_workers
        seconds = time.perf_counter() - start
        loads[worker].add(str(index), work.num_steps, loads[worker].tokens_of(work))
        places.append((str(index), worker))
        if is_filled:
            edit, other = places.popleft()
            loads[other].remove(edit)
            yield seconds

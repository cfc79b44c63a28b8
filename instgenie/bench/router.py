"""The time that the router takes to choose a worker. Imports no torch: routing is arithmetic in the HTTP process."""

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import get_args

from rich.console import Console
from rich.table import Table

from instgenie.cost.latency import DEFAULTS
from instgenie.cost.network import BlockShape, NetworkShape
from instgenie.cost.pricing import JobShape, make_costs
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.router import Router, Work, WorkerLoad
from instgenie.types import TierName

NUM_WORKERS = (8, 64, 256, 1024, 20_000)
BATCH_SIZE = 8
NUM_TOKENS = 4096
TIERS = tuple(enumerate(get_args(TierName)))  # every worker has a template in each
BLOCK = BlockShape(per_token=2 * 12 * 3072**2, per_text=2 * 12 * 3072**2, per_rest=0, per_pair=4 * 3072, per_branch=0,
                   width=3072, joint=True)  # fmt: skip
SHAPE = JobShape(NetworkShape((BLOCK,) * 57, (57,), per_token=0, per_branch=0), num_text=512)  # about FLUX.1-dev


def bench_router(repeats: int) -> None:
    table = Table("policy", "workers", "median ms", "p99 ms", "max ms", title=f"{repeats} decisions each")
    for policy in get_args(RoutingPolicy):
        for num_workers in NUM_WORKERS:
            times = sorted(1000 * seconds for seconds in decide(policy, num_workers, repeats))
            p99 = times[min(int(0.99 * len(times)), len(times) - 1)]
            numbers = (f"{ms:.3f}" for ms in (statistics.median(times), p99, times[-1]))
            table.add_row(policy, f"{num_workers}", *numbers)
    Console().print(table)


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
        start = time.perf_counter()
        worker = router.choose(work, loads) if is_filled else index % num_workers
        seconds = time.perf_counter() - start
        load = loads[worker]
        load.add(str(index), work.num_steps, load.tokens_of(work), load.price_of(work))
        places.append((str(index), worker))
        if is_filled:
            edit, other = places.popleft()
            loads[other].remove(edit)
            yield seconds

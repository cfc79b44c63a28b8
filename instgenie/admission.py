"""Who joins the running batch. Arithmetic over numbers of jobs and prices: the step loop of a worker asks, and so does
who simulates one."""

import math
from collections.abc import Iterable, Sequence

from instgenie.config import Batching
from instgenie.costs import Price, StepCosts

MAX_SIZE = 2**31
PATIENCE = 0.18  # of a running job: what it loses by a newcomer counts so much of what those that wait gain


def num_joining(sizes: Iterable[int], num_running: int, max_jobs: int, batching: Batching) -> int:
    """How many of the groups that wait, the oldest first, join at this step. Groups join whole, as far as there is
    room; one that is larger than a batch joins alone. A static batch lets nobody join before all of it is done."""
    if batching == "static" and num_running:
        return 0
    num_groups = 0
    for size in sizes:
        if num_running and num_running + size > max_jobs:
            break
        num_running += size
        num_groups += 1
    return num_groups


def num_worthwhile(costs: StepCosts, prices: Sequence[Price], num_waiting: int) -> int:
    """The size up to which a batch of jobs like these is worth to grow. One that joins makes the step of all others
    longer by what it computes, and spares all that wait the constant of a step; where a step waits for loads, it
    computes for nothing. So a batch grows with the queue, and the more the smaller its jobs are."""
    compute, load = (math.fsum(column) for column in zip(*prices, strict=True))
    if load > costs.per_step + compute or not compute:
        return MAX_SIZE
    return math.ceil(num_waiting * costs.per_step * len(prices) / (PATIENCE * compute))

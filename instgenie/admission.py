"""Who joins the running batch. Arithmetic over numbers of jobs and prices: the step loop of a worker asks, and so does
who simulates one."""

import math
from collections.abc import Iterable, Sequence

from instgenie.config import Batching
from instgenie.costs import Price, StepCosts

MAX_SIZE = 2**31
PATIENCE = 0.35  # of a running job: what it loses by a newcomer counts so much of what those that wait gain


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


def find_room(costs: StepCosts, prices: Sequence[Price], left: Sequence[int], num_steps: int, num_waiting: int) -> int:
    """The size up to which a batch is worth to grow by those that wait first. Prices are of the jobs that run and of
    those; `left` are the steps that each running job still takes, `num_steps` those of the longest that waits first.

    Who joins makes the steps of all others longer by what it computes, and spares all that wait the constant of a step.
    So a batch grows with the queue, and the more the smaller its jobs are. Where steps wait for loads, who joins
    computes for nothing; and who is done in half the time it would wait joins in any case."""
    compute, load = (math.fsum(column) for column in zip(*prices, strict=True))
    if load > costs.per_step + compute or not compute:
        return MAX_SIZE
    size = math.ceil(num_waiting * costs.per_step * len(prices) / (PATIENCE * compute))
    num_leaving = min(len(prices) - size, len(left))
    if num_leaving > 0 and sorted(left)[num_leaving - 1] >= 2 * num_steps:
        return len(prices)
    return size

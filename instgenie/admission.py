"""Who joins the running batch. Arithmetic over numbers of jobs: the step loop of a worker asks, and so does who
simulates one."""

from collections.abc import Iterable

from instgenie.config import Batching


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

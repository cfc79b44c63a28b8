"""Who joins the running batch. Arithmetic over prices and numbers of steps: the step loop of a worker asks, and so does
who simulates one.

Whoever joins makes the steps of all others longer, and spares all that wait the time that it shares with them. Two jobs
that share nothing take as long together as one after the other, only that the first ends later. So a batch grows while
that pays, and the longer the queue is the more it does.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from instgenie.cost.table import Price, StepCosts
from instgenie.scheduling.names import ONE_BATCH, Batching

PATIENCE = 0.35  # what a running job loses counts so much of what a waiting one gains


class Asking(NamedTuple):
    """A job, running or waiting."""

    price: Price  # of a step, in the mean over those that are left
    num_steps: int  # that are left


def num_joining(
    groups: Iterable[Sequence[Asking]],
    num_waiting: int,
    running: Sequence[Asking],
    max_jobs: int,
    batching: Batching,
    costs: StepCosts,
) -> int:
    """How many of the groups that wait, the oldest first, join at this step; no more of them are looked at than that
    takes. So many jobs wait in all of them. Groups join whole, as far as there is room; one that is larger than a batch
    joins alone. A static batch lets nobody join before all of it is done, a naive one everybody."""
    if running and batching in ONE_BATCH:
        return 0
    inside, num_groups = list(running), 0
    for group in groups:
        if inside and len(inside) + len(group) > max_jobs:
            break
        if inside and batching == "continuous" and not pays(group, inside, num_waiting, costs):
            break
        inside += group
        num_groups += 1
        num_waiting -= len(group)
    return num_groups


def pays(group: Sequence[Asking], running: Sequence[Asking], num_waiting: int, costs: StepCosts) -> bool:
    """Whether those that wait, the group among them, gain by its joining more than those that run lose. Who is done in
    half the time until the first of them is joins in any case."""
    if 2 * max(job.num_steps for job in group) <= min(job.num_steps for job in running):
        return True
    alone, before, together = (costs.step(job.price for job in jobs) for jobs in (group, running, (*running, *group)))
    lost = together - before
    return num_waiting * (alone - lost) >= PATIENCE * len(running) * lost

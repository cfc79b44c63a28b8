"""The scheduler decides, before every step, which waiting jobs join the running batch.

It sees plain numbers: the groups that wait, the price and the remaining steps of each job, and the cost of a step.
The step loop of a worker, the single-process editor and the simulator ask the same object. Jobs that arrive together
form a group and join together. A group whose activations are still loading is passed over.

Long jobs leave some slots of a batch to others, and a long group joins part by part as there is room. So no job waits
for a batch of long ones to end. Nor should it wait long for their step to end: they join one at a time, since jobs that
join together are dense at the same steps, and only as many as raise the throughput.

A joining job amortises the step's fixed cost but lengthens the step for the others. Two jobs that share nothing take
as long together as one after the other, except that the first one ends later. So a batch grows while that pays, and it
pays more the longer the queue is.

A scheduler only lets jobs join; `policy` sorts the queue before it and says which running jobs leave.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from instgenie.cost.table import StepCosts
from instgenie.scheduling.names import Batching
from instgenie.scheduling.terms import PricedJob

PATIENCE = 0.35  # weight of a running job's loss against a waiting job's gain
LONG = 100  # a job with more steps left than this is long
MAX_LONG_AT_ONCE = 1  # long jobs that join before the same step
LONG_GAIN = 1.05  # how many times as many job steps per second a batch must take for another long job to join it


class WaitingGroup(Protocol):
    """Jobs that join a batch together."""

    @property
    def is_ready(self) -> bool:
        """False while the activations of one of its jobs are loading."""

    @property
    def is_overdue(self) -> bool:
        """True if too many younger jobs have overtaken it."""

    @property
    def num_jobs(self) -> int: ...

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        """Price the jobs. Called only for groups that may join, so that a long queue costs nothing."""


class Split(NamedTuple):
    """A waiting group is cut in two; the second part waits behind the first."""

    position: int  # in the queue
    num_first: int  # jobs of the first part


class Decision(NamedTuple):
    """Changes to the batch and the queue before the next step."""

    joining: Sequence[int] = ()  # positions in the queue, after the split; all others wait
    split: Split | None = None
    leaving: Sequence[int] = ()  # positions in the batch of running jobs that leave it before the others join


class Scheduler(Protocol):
    def decide(
        self,
        waiting: Iterable[WaitingGroup],
        num_ready: int,
        running: Sequence[PricedJob],
        max_jobs: int,
        costs: StepCosts,
    ) -> Decision:
        """Decide which groups join. `waiting` is in the order of arrival, `num_ready` counts the jobs of its ready
        groups, and a batch has room for `max_jobs`. A group larger than that joins an empty batch alone."""


Admit = Callable[[Sequence[PricedJob], Sequence[PricedJob], int, StepCosts], bool]


@dataclass(frozen=True)
class FirstCome:
    """Ready groups join in the order of arrival while there is room and `admit` agrees. No ready group overtakes
    another, except that with `keeps_room` all may overtake long ones: these join part by part, leave some slots of the
    batch to others, and need no agreement once they are overdue."""

    admit: Admit
    keeps_room: bool = False

    def decide(
        self,
        waiting: Iterable[WaitingGroup],
        num_ready: int,
        running: Sequence[PricedJob],
        max_jobs: int,
        costs: StepCosts,
    ) -> Decision:
        batch, joining, split = list(running), list[int](), None
        num_long = 0  # that join
        for index, group in enumerate(waiting):
            if not group.is_ready:
                continue
            room = max_jobs - len(batch)
            if batch and room <= 0:
                break
            jobs, position = group.priced(costs), index + bool(split)  # a split moves the groups behind it
            if self.keeps_room and is_long(jobs):
                part = jobs[: min(room_for_long(batch, max_jobs), MAX_LONG_AT_ONCE - num_long)]
                is_cut = len(part) < len(jobs)
                if not part or (is_cut and split):
                    continue
                has_reason = group.is_overdue or not batch
                if not has_reason and not (gains(part, batch, costs) and self.admit(part, batch, num_ready, costs)):
                    continue
                split = Split(position, len(part)) if is_cut else split
                num_long += len(part)
            else:
                part, fits = jobs, not batch or len(jobs) <= room
                if not fits:
                    if joining or not (group.is_overdue or waits_too_long(jobs, running, room)):
                        break
                    split, part = Split(position, room), jobs[:room]
                if batch and not group.is_overdue and not self.admit(part, batch, num_ready, costs):
                    break
            batch += part
            joining.append(position)
            num_ready -= len(part)
        return Decision(joining, split)


@dataclass(frozen=True)
class OneBatch:
    """No job joins before the running batch is done; the next batch takes all there is room for."""

    def decide(
        self,
        waiting: Iterable[WaitingGroup],
        num_ready: int,
        running: Sequence[PricedJob],
        max_jobs: int,
        costs: StepCosts,
    ) -> Decision:
        if running:
            return Decision()
        return FILL.decide(waiting, num_ready, running, max_jobs, costs)


def is_long(jobs: Iterable[PricedJob]) -> bool:
    return any(job.num_steps > LONG for job in jobs)


def room_for_long(batch: Sequence[PricedJob], max_jobs: int) -> int:
    """Slots that further long jobs may take: a quarter of the slots, and one at least where there are two, stays free
    of them."""
    num_long = sum(job.num_steps > LONG for job in batch)
    max_long = max(max_jobs - max(max_jobs // 4, 1), 1)
    return max(min(max_jobs - len(batch), max_long - num_long), 0)


def gains(group: Sequence[PricedJob], batch: Sequence[PricedJob], costs: StepCosts) -> bool:
    """Return whether long jobs raise the throughput of the long ones that run; beside short ones they always join."""
    running = [job for job in batch if job.num_steps > LONG]
    return not running or throughput((*running, *group), costs) >= LONG_GAIN * throughput(running, costs)


def throughput(batch: Sequence[PricedJob], costs: StepCosts) -> float:
    """Job steps per second."""
    return len(batch) / max(costs.step_seconds(job.price for job in batch), 1e-9)


def waits_too_long(group: Sequence[PricedJob], running: Sequence[PricedJob], room: int) -> bool:
    """Return whether a group that does not fit would wait for room longer than it runs. It is then split, so that its
    first jobs join as soon as that pays."""
    remaining = sorted(job.num_steps for job in running)
    num_leaving = min(len(group) - room, len(remaining))
    return remaining[num_leaving - 1] > max(job.num_steps for job in group)


def pays(group: Sequence[PricedJob], batch: Sequence[PricedJob], num_waiting: int, costs: StepCosts) -> bool:
    """Return whether the waiting jobs, the group among them, gain more than the batch loses if the group joins. What
    jobs lose that have at least twice as many steps left does not count: it is little of the time that they take."""
    num_steps = max(job.num_steps for job in group)
    num_peers = sum(job.num_steps < 2 * num_steps for job in batch)
    if not num_peers:
        return True
    alone, before, together = (
        costs.step_seconds(job.price for job in jobs) for jobs in (group, batch, (*batch, *group))
    )
    lost = together - before
    return num_waiting * (alone - lost) >= PATIENCE * num_peers * lost


def always(group: Sequence[PricedJob], batch: Sequence[PricedJob], num_waiting: int, costs: StepCosts) -> bool:
    return True


FILL = FirstCome(always)  # every job joins as soon as there is room

SCHEDULERS: dict[Batching, Scheduler] = {
    "continuous": FirstCome(pays, keeps_room=True),
    "static": OneBatch(),
    "static-pipelined": OneBatch(),
    "naive": FILL,
}

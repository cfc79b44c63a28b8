"""Rows of whole steps, brought to where the device reads them one step ahead of their use. Knows activations and
streams; knows no pass.

Edits that are at one step of one template share what is brought. Copies run on a stream of their own, beside the step
before; whoever computes waits for all of a step's rows at once, so nothing has to be known of the order of the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from instgenie.activations import Activations
from instgenie.batch import Job
from instgenie.engine.route import places_of

StageKey: TypeAlias = tuple[int, int]  # where the first rows of a step lie, and how many branches have some


@dataclass(frozen=True, eq=False)
class Staged:
    """What is read of one step of a template."""

    activations: Activations  # whose rows they are: not forgotten while they are read
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by place and branch [2 or 1, tokens, width]
    ready: list[torch.cuda.Event] = field(default_factory=list)


class Staging:
    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device = device
        self.max_bytes = max_bytes
        self.staged: dict[StageKey, Staged] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.before: torch.cuda.Event | None = None

    def has_room(self, jobs: Sequence[Job]) -> bool:
        """For the rows of the jobs' present steps and those after."""
        steps = [(job.activations, job.step) for job in jobs if job.activations]
        num_bytes = {stage_key(*one): num_step_bytes(one[0]) for one in steps}
        return 2 * sum(num_bytes.values()) <= self.max_bytes

    def bring(self, jobs: Sequence[Job]) -> None:
        """Lets whoever computes from here on wait for the rows of the jobs' present steps."""
        if self.stream:  # what was computed before is what reads the rows that go next
            self.before = torch.cuda.current_stream(self.device).record_event()
        self.start(jobs, num_ahead=0)
        for key in keys_of(jobs, num_ahead=0):
            for ready in self.staged[key].ready:
                torch.cuda.current_stream(self.device).wait_event(ready)

    def look_ahead(self, jobs: Sequence[Job]) -> None:
        """Starts to bring the rows of the jobs' next steps beside the computing of the present ones; of others, nothing
        is kept."""
        keys = {*keys_of(jobs, num_ahead=0), *keys_of(jobs, num_ahead=1)}
        old = [key for key in self.staged if key not in keys]
        if self.stream and self.before:
            self.stream.wait_event(self.before)
        for key in old:
            del self.staged[key]
        self.start(jobs, num_ahead=1)

    def start(self, jobs: Sequence[Job], num_ahead: int) -> None:
        for job in jobs:
            if places := places_of(job, num_ahead):
                assert job.activations is not None
                self.stage(job.activations, job.step + num_ahead, places)

    def stage(self, activations: Activations, step: int, places: Sequence[int]) -> None:
        """Of these places, those that are not there yet."""
        staged = self.staged.setdefault(stage_key(activations, step), Staged(activations))
        missing = [place for place in places if (place, 0) not in staged.rows]
        if not missing:
            return
        with torch.cuda.stream(self.stream):
            for place in missing:
                for branch in range(activations.num_branches):
                    staged.rows[place, branch] = activations.at(step, place, branch, self.device)
            if self.stream:
                staged.ready.append(self.stream.record_event())

    def addresses(self, job: Job, branch: int) -> list[int]:
        """Where the rows of its present step are, place after place; 0 where it reads none."""
        assert job.activations is not None
        rows = self.staged[stage_key(job.activations, job.step)].rows
        branch = min(branch, job.activations.num_branches - 1)
        places = [rows.get((place, branch)) for place in range(len(job.activations.rows))]
        return [0 if one is None else one.data_ptr() for one in places]


def keys_of(jobs: Sequence[Job], num_ahead: int) -> list[StageKey]:
    """Of what they read so many steps later."""
    return [
        stage_key(job.activations, job.step + num_ahead)
        for job in jobs
        if job.activations and places_of(job, num_ahead)
    ]


def stage_key(activations: Activations, step: int) -> StageKey:
    return activations.rows[0][0, step].data_ptr(), activations.num_branches


def num_step_bytes(activations: Activations) -> int:
    """As the model reads them; packed ones are smaller by less than half."""
    return sum(rows[:, 0].nbytes for rows in activations.rows) * (2 if activations.is_packed else 1)

"""Rows of whole steps, brought to where the device reads them one step ahead of their use. Knows activations and
streams; knows no pass.

Edits that are at one step of one template share what is brought. Copies run on a stream of their own, beside the step
before; whoever computes waits for all of a step's rows at once, so nothing has to be known of the order of the pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from instgenie.activations import Activations
from instgenie.batch import Job

StageKey: TypeAlias = tuple[int, int]  # where the first rows of a step lie, and how many branches have some


@dataclass(frozen=True, eq=False)
class Staged:
    """One step of a template."""

    activations: Activations  # whose rows they are: not forgotten while they are read
    rows: list[list[Tensor]]  # of each branch, of each place [2 or 1, tokens, width]
    ready: torch.cuda.Event | None


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
        steps = [(job.activations, job.step) for job in jobs if job.activations]
        self.start(steps)
        for activations, step in steps:
            ready = self.staged[stage_key(activations, step)].ready
            if ready:
                torch.cuda.current_stream(self.device).wait_event(ready)

    def look_ahead(self, jobs: Sequence[Job]) -> None:
        """Starts to bring the rows of the jobs' next steps beside the computing of the present ones; of others, nothing
        is kept."""
        now = [(job.activations, job.step) for job in jobs if job.activations]
        ahead = [(activations, step + 1) for activations, step in now if step + 1 < activations.num_steps]
        keys = {stage_key(*one) for one in (*now, *ahead)}
        old = [key for key in self.staged if key not in keys]
        if self.stream and self.before:
            self.stream.wait_event(self.before)
        for key in old:
            del self.staged[key]
        self.start(ahead)

    def start(self, steps: Iterable[tuple[Activations, int]]) -> None:
        for activations, step in steps:
            key = stage_key(activations, step)
            if key not in self.staged:
                self.staged[key] = self.stage(activations, step)

    def stage(self, activations: Activations, step: int) -> Staged:
        branches, places = range(activations.num_branches), range(len(activations.rows))
        with torch.cuda.stream(self.stream):
            rows = [[activations.at(step, place, branch, self.device) for place in places] for branch in branches]
            ready = self.stream.record_event() if self.stream else None
        return Staged(activations, rows, ready)

    def addresses(self, job: Job, branch: int) -> list[int]:
        """Where the rows of its present step are, place after place."""
        assert job.activations is not None
        rows = self.staged[stage_key(job.activations, job.step)].rows
        return [one.data_ptr() for one in rows[min(branch, len(rows) - 1)]]


def stage_key(activations: Activations, step: int) -> StageKey:
    return activations.rows[0][0, step].data_ptr(), activations.num_branches


def num_step_bytes(activations: Activations) -> int:
    """As the model reads them; packed ones are smaller by less than half."""
    return sum(rows[:, 0].nbytes for rows in activations.rows) * (2 if activations.is_packed else 1)

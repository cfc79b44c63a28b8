"""A loader that notes when each step, read and load begins and ends. Measures; draws nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from instgenie.cost.plan import Plan
from instgenie.engine.loading.lanes import RowChoice, StreamLane, ThreadLane, Transfer
from instgenie.engine.loading.loader import Loader
from instgenie.jobs.job import Job
from instgenie.jobs.rows import StepRows
from instgenie.models.model import Model

Mark = Any  # a CUDA event, or seconds


class StreamClock:
    """Marks in time: events on the current stream of a CUDA device, or readings of a clock."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Mark:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Mark, end: Mark) -> float:
        """Return the milliseconds between two marks."""
        return float(start.elapsed_time(end)) if self.is_cuda else 1000 * (end - start)


@dataclass(frozen=True, eq=False)
class Moment:
    """A read of a place: when it was asked for, and when its rows were there."""

    place: int
    asked: Mark
    there: Mark


@dataclass(eq=False)
class StepMarks:
    plan: Plan
    start: Mark
    moments: list[Moment]
    end: Mark = None


@dataclass(frozen=True, eq=False)
class Filled:
    """A load, from its beginning to its end."""

    step: int
    place: int
    start: Mark
    end: Mark


Note = Callable[[int, Mark, Mark], None]


class TimedStreamLane(StreamLane):
    def __init__(self, device: torch.device, rows: RowChoice, note: Note, clock: StreamClock) -> None:
        super().__init__(device, rows)
        self.note, self.clock = note, clock

    def fill(self, transfers: Sequence[Transfer]) -> None:
        start = self.clock.mark()
        super().fill(transfers)
        self.note(transfers[0].place, start, self.clock.mark())


class TimedThreadLane(ThreadLane):
    def __init__(self, note: Note, clock: StreamClock) -> None:
        super().__init__()
        self.note, self.clock = note, clock

    def fill(self, transfers: Sequence[Transfer]) -> None:
        start = self.clock.mark()
        super().fill(transfers)
        self.note(transfers[0].place, start, self.clock.mark())


class TimedLoader(Loader):
    """A loader that notes when steps, reads and loads begin and end."""

    def __init__(self, model: Model, max_buffers: int | None, rows: RowChoice) -> None:
        super().__init__(model, max_buffers, rows)
        self.clock = StreamClock(model.device)
        self.steps: list[StepMarks] = []
        self.filled: list[Filled] = []
        if model.device.type == "cuda":
            self.lane = TimedStreamLane(model.device, rows, self.note, self.clock)
        else:
            self.lane = TimedThreadLane(self.note, self.clock)

    def note(self, place: int, start: Mark, end: Mark) -> None:
        self.filled.append(Filled(self.step, place, start, end))

    @contextmanager
    def loading(self, jobs: Sequence[Job]) -> Iterator[StepRows]:
        with super().loading(jobs) as rows:
            step = StepMarks(jobs[0].plan, self.clock.mark(), [])
            self.steps.append(step)
            yield rows
            step.end = self.clock.mark()

    def wait(self, stop: int) -> None:
        asked = self.clock.mark()
        super().wait(stop)
        self.steps[-1].moments.append(Moment(self.route.stops[stop][0].place, asked, self.clock.mark()))

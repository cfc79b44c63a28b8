"""The mailbox of a step loop: hands messages that arrive to their handlers, and reports on jobs."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from instgenie.cluster.wire import BatchStepped, Denoised, Frame, Glimpsed, Joined, Preempted
from instgenie.engine.own import reuse_found
from instgenie.telemetry import traces
from instgenie.workers.frames import tensor_frame, tensor_head
from instgenie.workers.line import Line
from instgenie.workers.process import failure
from instgenie.workers.queue import JobGroup, TrackedJob

Handler = Callable[[Any, list[Frame]], None]


class Mailbox:
    def __init__(self, line: Line, handlers: Mapping[type, Handler]) -> None:
        self.line = line
        self.handlers = handlers

    def read_all(self, wait: bool) -> None:
        """Handle all messages that are there; with `wait`, wait for the first."""
        while received := self.line.receive(wait):
            message, frames = received
            self.handlers[type(message)](message, frames)
            wait = False

    def report_joined(self, group: JobGroup) -> None:
        told = [(step, tracked.job.plan) for tracked in group.jobs for step in tracked.progress]
        self.line.send(Joined(tuple(step for step, _ in told), tuple(plan for _, plan in told)))

    def report_preempted(self, jobs: Sequence[TrackedJob], by: TrackedJob) -> None:
        self.line.send(Preempted(tuple(step for tracked in jobs for step in tracked.progress), by.id))

    def report_step(
        self,
        jobs: Sequence[TrackedJob],
        seconds: float,
        predicted: float,
        num_interruptions: int,
        num_joined: int = 0,
        between: float = 0.0,
    ) -> None:
        steps = tuple(step for tracked in jobs for step in tracked.progress)
        stepped = BatchStepped(seconds, predicted, num_interruptions, steps, 0, num_joined, between)
        self.line.send(stepped)

    def report_failure(self, tracked: TrackedJob, error: Exception) -> None:
        for asker in tracked.askers:
            self.line.send(failure(asker, error))

    def send_partial(self, tracked: TrackedJob, before: Tensor) -> None:
        """Send a prediction of the job's result, made from its latents before and after the last step."""
        job = tracked.job
        latents = job.schedule.foreseen(before, job.latents, job.step - 1)
        index = tracked.partials.index(job.step)
        head, frame = tensor_head(latents), tensor_frame(latents)
        self.line.send(Glimpsed(tracked.id, tracked.attempt, index, head), [frame])
        for follower in tracked.followers:
            if follower.num_partials:
                self.line.send(Glimpsed(follower.id, follower.attempt, index, head), [frame])

    def send_latents(self, tracked: TrackedJob) -> tuple[Denoised, Frame]:
        """Hand over a job that has taken all its steps. Returns what was sent."""
        job, seconds = tracked.job, tracked.run_seconds + time.perf_counter() - tracked.joined_at
        head = tensor_head(job.latents)
        frame = tensor_frame(job.latents)
        for asker in tracked.askers:
            told = job.num_computed_tokens, seconds, reuse_found(job), tracked.loras.facts if tracked.loras else None
            message = Denoised(asker.id, asker.attempt, head, *told, tracked.num_control_retries, tracked.guidance)
            self.line.send(message, [frame])
        facts = {"num_steps": job.num_steps, "num_computed_tokens": job.num_computed_tokens}
        traces.record(tracked.trace, "denoise", seconds, attempt=tracked.attempt, **facts)
        return message, frame

"""The denoise process of a worker: takes steps, and registers templates in between. Knows no picture and no prompt.

At every step finished jobs leave and waiting jobs join, the oldest first. Two other policies are there to compare with:
`static` lets no job join before the whole batch is done, `naive` prepares and finishes inside the step loop.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from instgenie.activations import Key, Kind
from instgenie.batch import Job
from instgenie.config import ProcessConfig
from instgenie.engine.frames import read_job, tensor_frame, tensor_head
from instgenie.engine.kept import Kept
from instgenie.engine.loop import Engine
from instgenie.engine.register import Registration, make_key, reuse
from instgenie.models.memory import is_out_of_memory
from instgenie.models.model import Model
from instgenie.wire import (
    Cancel,
    Denoise,
    Denoised,
    Denoising,
    Evicted,
    Finish,
    Forget,
    Frame,
    Glimpsed,
    JobStep,
    Joined,
    Missing,
    Prepare,
    PrepareTemplate,
    Register,
    Registered,
    Stepped,
    Stop,
    split_frames,
)
from instgenie.workers.finish import Finisher
from instgenie.workers.prepare import Preparer
from instgenie.workers.process import Line, failure, run_process

KIND: Kind = "kv"
PARTS = frozenset({"transformer", "unet"})

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """A job of the step loop and what is to be told about it."""

    id: str
    attempt: int
    job: Job
    template: str | None
    partials: tuple[int, ...]  # steps after which the client wants to see a picture
    joined_at: float = 0.0

    @property
    def progress(self) -> JobStep:
        return JobStep(self.id, self.attempt, self.job.step)


@dataclass(eq=False)
class Registering:
    attempt: int
    registration: Registration
    is_urgent: bool


class Denoiser:
    def __init__(self, config: ProcessConfig, model: Model, line: Line) -> None:
        self.config = config
        self.model = model
        self.line = line
        self.engine = Engine(model, config.max_batch_size)
        self.waiting: deque[list[Running]] = deque()  # groups, each joins as one
        self.running: dict[Job, Running] = {}
        self.registering: dict[str, Registering] = {}
        self.kept = Kept(config.cache_bytes)
        self.num_interruptions = 0
        self.is_stopped = False
        self.handlers: dict[type, Callable[[Any, list[Frame]], None]] = {
            Denoise: self.accept,
            Register: self.accept_template,
            Cancel: self.cancel,
            Forget: self.forget,
            Stop: self.stop,
        }
        if config.batching == "naive":
            preparer, finisher = Preparer(model, line), Finisher(model, line)
            self.handlers |= {Prepare: preparer.handle, PrepareTemplate: preparer.handle, Finish: finisher.handle}

    def run(self) -> None:
        while not self.is_stopped:
            self.hear()
            self.join()
            if self.engine.jobs:
                self.step()
            if registering := self.next_registering():
                self.register(*registering)

    # messages

    def hear(self) -> None:
        while heard := self.line.receive(wait=self.is_idle):
            message, frames = heard
            if isinstance(message, Prepare | PrepareTemplate | Finish):
                self.interrupt()
            self.handlers[type(message)](message, frames)

    @property
    def is_idle(self) -> bool:
        return not (self.engine.jobs or self.waiting or self.registering or self.is_stopped)

    def interrupt(self) -> None:
        self.num_interruptions += bool(self.engine.jobs)

    def accept(self, message: Denoise, frames: list[Frame]) -> None:
        pairs = zip(message.jobs, split_frames(frames, message.jobs), strict=True)
        if group := [running for running in (self.read(*pair) for pair in pairs) if running]:
            self.waiting.append(group)

    def read(self, given: Denoising, frames: Sequence[Frame]) -> Running | None:
        self.cancel(Cancel(given.id), [])  # an older attempt
        if given.template is not None and given.template not in self.kept:
            self.line.send(Missing(given.id, given.attempt, given.template))
            return None
        try:
            job = read_job(given.job, frames, self.model.device)
            if given.template is not None:
                job = reuse(job, self.kept.pin(given.template))
        except Exception as error:
            self.line.send(failure(given.id, given.attempt, error))
            return None
        return Running(given.id, given.attempt, job, given.template, partial_steps(job.num_steps, given.num_partials))

    def cancel(self, message: Cancel, _: list[Frame]) -> None:
        self.registering.pop(message.id, None)
        for group in self.waiting:
            for running in [running for running in group if running.id == message.id]:
                group.remove(running)
                self.release(running)
        self.waiting = deque(group for group in self.waiting if group)
        for running in [running for running in self.running.values() if running.id == message.id]:
            self.engine.leave(running.job)
            self.leave(running)

    def forget(self, message: Forget, _: list[Frame]) -> None:
        self.kept.drop(message.template)

    def stop(self, _: Stop, __: list[Frame]) -> None:
        self.is_stopped = True

    # steps

    def join(self) -> None:
        """Groups join whole, the oldest first, as far as there is room."""
        if not self.engine.jobs:
            self.engine.max_jobs = self.config.max_batch_size  # whatever did not fit is gone
        if self.config.batching == "static" and self.engine.jobs:
            return
        while self.waiting and self.has_room(self.waiting[0]):
            group = self.waiting.popleft()
            for running in group:
                running.joined_at = time.perf_counter()
                self.running[running.job] = running
                self.engine.join(running.job)
            plans = tuple(running.job.plan for running in group)
            self.line.send(Joined(tuple(running.progress for running in group), plans))

    def has_room(self, group: list[Running]) -> bool:
        """A group larger than a batch joins alone; the engine takes its jobs in turn."""
        return not self.engine.jobs or len(self.engine.jobs) + len(group) <= self.engine.max_jobs

    def step(self) -> None:
        jobs = self.engine.pick()
        before = {job: job.latents for job in jobs if job.step + 1 in self.running[job].partials}
        num_tokens = sum(num_flowing(job) for job in jobs)
        start = time.perf_counter()
        failed = self.advance(jobs)
        self.synchronize()
        seconds = time.perf_counter() - start
        for job, error in failed.items():
            self.engine.leave(job)
            self.line.send(failure(self.running[job].id, self.running[job].attempt, error))
            self.leave(self.running[job])
        steps = tuple(self.running[job].progress for job in jobs if job not in failed)
        self.line.send(Stepped(seconds, num_tokens, self.num_interruptions, steps))
        for job, latents in before.items():
            if job not in failed:
                self.glimpse(self.running[job], latents)
        for job in self.engine.hand_over():
            self.hand_over(self.running[job])

    def advance(self, jobs: list[Job]) -> dict[Job, Exception]:
        """Takes one step of each job, together; where that fails, in halves, so that only who cannot take it alone
        fails."""
        steps = {job: job.step for job in jobs}
        try:
            self.engine.advance(jobs)
        except Exception as error:
            left = [job for job in jobs if job.step == steps[job]]
            if len(left) <= 1:
                return dict.fromkeys(left, error)
            half = len(left) // 2
            if is_out_of_memory(error):
                log.warning("out of memory: the batch is halved", extra={"num_jobs": len(left)})
                self.engine.max_jobs = half
                self.free_memory()
            return self.advance(left[:half]) | self.advance(left[half:])
        return {}

    def glimpse(self, running: Running, before: Tensor) -> None:
        job = running.job
        latents = job.schedule.foreseen(before, job.latents, job.step - 1)
        index = running.partials.index(job.step)
        self.line.send(Glimpsed(running.id, running.attempt, index, tensor_head(latents)), [tensor_frame(latents)])

    def hand_over(self, running: Running) -> None:
        job = running.job
        seconds = time.perf_counter() - running.joined_at
        head = tensor_head(job.latents)
        message = Denoised(running.id, running.attempt, head, job.num_computed_tokens, seconds)
        self.line.send(message, [tensor_frame(job.latents)])
        self.leave(running)

    def leave(self, running: Running) -> None:
        del self.running[running.job]
        self.release(running)

    def release(self, running: Running) -> None:
        if running.template is not None:
            self.kept.unpin(running.template)

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def free_memory(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    # templates

    def accept_template(self, message: Register, frames: list[Frame]) -> None:
        known = self.registering.get(message.id)
        if known and known.attempt == message.attempt:
            known.is_urgent |= message.is_urgent
            return
        try:
            job = read_job(message.job, frames, self.model.device)
            registration = Registration(self.template_key(message.id, job), job, self.model)
        except Exception as error:
            self.line.send(failure(message.id, message.attempt, error))
            return
        self.registering[message.id] = Registering(message.attempt, registration, message.is_urgent)

    def template_key(self, template: str, job: Job) -> Key:
        """Named by its id, for the picture itself stayed behind."""
        return replace(make_key(job.edit, self.model, KIND), picture=template)

    def next_registering(self) -> tuple[str, Registering] | None:
        """A template that a job waits for; or any, while no job runs."""
        is_idle = not self.engine.jobs
        return next((item for item in self.registering.items() if is_idle or item[1].is_urgent), None)

    def register(self, template: str, registering: Registering) -> None:
        """A few steps of a template."""
        self.interrupt()
        registration = registering.registration
        try:
            registration.advance()
            self.evict(self.kept.make_room(template, registration.num_bytes))
            if registration.done:
                self.evict(self.kept.keep(template, registration.activations))
        except Exception as error:
            del self.registering[template]
            self.free_memory()
            self.line.send(failure(template, registering.attempt, error))
            return
        if registration.done:
            del self.registering[template]
        num_bytes = registration.num_bytes
        progress = registration.num_registered_steps, registration.num_steps
        self.line.send(Registered(template, registering.attempt, *progress, num_bytes))

    def evict(self, templates: list[str]) -> None:
        for template in templates:
            self.line.send(Evicted(template))


def num_flowing(job: Job) -> int:
    """Tokens of an image that the coming step computes, in the mean over blocks."""
    if job.step < job.edit.dense_steps or not job.plan:
        return len(job.masked)
    return round(len(job.masked) - sum(job.plan) / len(job.plan) * len(job.outside))


def partial_steps(num_steps: int, num_partials: int) -> tuple[int, ...]:
    """Steps after which to show a picture: spread evenly, the last step not among them."""
    steps = (num_steps * (index + 1) // (num_partials + 1) for index in range(num_partials))
    return tuple(dict.fromkeys(step for step in steps if 0 < step < num_steps))


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    Denoiser(config, model, line).run()


if __name__ == "__main__":
    run_process(serve, PARTS)

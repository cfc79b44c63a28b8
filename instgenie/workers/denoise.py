"""The denoise process of a worker: takes steps, and registers templates in between. Knows no picture and no prompt.

At every step finished jobs leave and waiting jobs join, the oldest first. A job whose template is still on its way up
from a lower tier lets others go first; the loop never waits for one. Other ways are there to compare with:

    static            one batch after the other, each prepared, denoised and finished by this one process
    static-pipelined  one batch after the other, prepared and finished by processes of their own
    naive             whoever comes joins; this one process prepares and finishes between steps
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from instgenie.cluster.config import ProcessConfig
from instgenie.cluster.wire import (
    Cancel,
    Denoise,
    Denoised,
    Denoising,
    Fetch,
    Finish,
    Forget,
    Found,
    Frame,
    Glimpsed,
    JobStep,
    Joined,
    List,
    Missing,
    Prepare,
    PrepareTemplate,
    Priced,
    Recall,
    Register,
    Registered,
    Stepped,
    Stop,
    TemplateHead,
    read_picture,
    split_frames,
)
from instgenie.engine.graphs import make_graphs
from instgenie.engine.loop import Engine
from instgenie.engine.planning import make_planning
from instgenie.engine.pricing import NO_MASK, NO_PICTURE, mean_price, price_of, price_steps
from instgenie.engine.register import Registration, make_activations, name_key, reuse
from instgenie.jobs.activations import Key, Kind
from instgenie.jobs.job import Job
from instgenie.machine.device import is_out_of_memory
from instgenie.models.model import Model
from instgenie.scheduling.admission import Asking, num_joining
from instgenie.scheduling.names import ONE_PROCESS
from instgenie.telemetry import traces
from instgenie.types import Edit, Pixels
from instgenie.workers.chores import Chore, Chores
from instgenie.workers.frames import read_job, tensor_frame, tensor_head
from instgenie.workers.process import Line, failure, run_process
from instgenie.workers.templates import Fetching, Outcome, Templates, open_store

KIND: Kind = "kv"
MAX_KEYS = 1024  # that are remembered
LONGEST_TRIP = 0.5  # seconds that what was prepared or denoised takes to the cluster and back
PARTS = frozenset({"transformer", "unet"})

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """A job of the step loop and what is to be told about it."""

    id: str
    attempt: int
    job: Job
    partials: tuple[int, ...]  # steps after which the client wants to see a picture
    fetching: Fetching | None = None  # its template's activations
    is_sure: bool = False  # it may not do without them
    key: Key | None = None  # of the activations it uses
    joined_at: float = 0.0
    trace: str = ""

    @property
    def progress(self) -> JobStep:
        return JobStep(self.id, self.attempt, self.job.step)


@dataclass(eq=False)
class Registering:
    attempt: int
    key: Key
    job: Job
    is_urgent: bool
    missing: Future[list[range]]
    picture: Pixels | None  # to be kept with the activations
    registration: Registration | None = None  # once it is known what is missing


class Denoiser:
    def __init__(self, config: ProcessConfig, model: Model, line: Line) -> None:
        self.config = config
        self.model = model
        self.line = line
        self.costs = price_steps(model, config.model, config.plan, config.cache.dtype)
        planning = make_planning(model, config.model, config.plan)
        self.engine = Engine(model, config.max_batch_size, planning, graphs=make_graphs(model, config.graphs))
        self.waiting: deque[list[Running]] = deque()  # groups, each joins as one
        self.running: dict[Job, Running] = {}
        self.registering: dict[str, Registering] = {}
        self.templates = Templates(open_store(config.cache, model.device), model.device, line.wake)
        self.find_key = lru_cache(MAX_KEYS)(self.make_key)
        self.num_interruptions = 0
        self.is_stopped = False
        self.handlers: dict[type, Callable[[Any, list[Frame]], None]] = {
            Denoise: self.accept,
            Fetch: self.foresee,
            Register: self.accept_template,
            Cancel: self.cancel,
            Forget: self.forget,
            List: self.list_templates,
            Recall: self.recall,
            Stop: self.stop,
        }
        self.chores = Chores(model, line, config.max_batch_size)
        if config.batching in ONE_PROCESS:
            do = self.do_now if config.batching == "naive" else self.do_later
            self.handlers |= {Prepare: do, PrepareTemplate: do, Finish: do}

    def run(self) -> None:
        self.line.send(Priced(self.costs))
        while not self.is_stopped:
            self.hear(wait=self.is_idle)
            self.do_chores()
            self.join()
            if self.engine.jobs:
                self.step()
            if registering := self.next_registering():
                self.register(*registering)
        self.templates.close()

    # messages

    def hear(self, wait: bool) -> None:
        """All messages that are there; who waits, waits for the first."""
        while heard := self.line.receive(wait):
            message, frames = heard
            self.handlers[type(message)](message, frames)
            wait = False
        for told in self.templates.told():
            self.line.send(*told)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do but to wait for messages, or for what threads do."""
        has_jobs = self.engine.jobs or any(is_settled(group) for group in self.waiting)
        has_chores = self.chores.away or self.chores.due(self.num_waiting)
        return not (has_jobs or has_chores or self.next_registering() or self.is_stopped)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))

    def interrupt(self) -> None:
        self.num_interruptions += bool(self.engine.jobs)

    def accept(self, message: Denoise, frames: list[Frame]) -> None:
        pairs = zip(message.jobs, split_frames(frames, message.jobs), strict=True)
        if group := [running for running in (self.read(*pair) for pair in pairs) if running]:
            self.waiting.append(group)

    def read(self, given: Denoising, frames: Sequence[Frame]) -> Running | None:
        self.cancel(Cancel(given.id), [])  # an older attempt
        try:
            job = read_job(given.job, frames, self.model.device)
            fetching = self.templates.fetch(self.find_key(given.template)) if given.template else None
        except Exception as error:
            self.line.send(failure(given.id, given.attempt, error))
            return None
        partials = partial_steps(job.num_steps, given.num_partials)
        return Running(given.id, given.attempt, job, partials, fetching, given.is_sure, trace=given.trace)

    def foresee(self, message: Fetch, _: list[Frame]) -> None:
        self.templates.foresee(message.id, self.find_key(message.template))

    def make_key(self, template: TemplateHead) -> Key:
        edit = Edit(NO_PICTURE, NO_MASK, "", steps=template.steps, guidance=template.guidance, size=template.size)
        return name_key(template.id, template.model, edit, self.model, KIND, self.config.cache.dtype, template.tenant)

    def cancel(self, message: Cancel, _: list[Frame]) -> None:
        if registering := self.registering.pop(message.id, None):
            self.templates.unpin(registering.key)
        self.chores.drop(message.id)
        for group in self.waiting:
            for running in [running for running in group if running.id == message.id]:
                group.remove(running)
                self.release(running)
        self.waiting = deque(group for group in self.waiting if group)
        for running in [running for running in self.running.values() if running.id == message.id]:
            self.engine.leave(running.job)
            self.leave(running)

    def forget(self, message: Forget, _: list[Frame]) -> None:
        self.templates.forget(self.find_key(message.template))

    def list_templates(self, message: List, _: list[Frame]) -> None:
        self.templates.list_all(message.model, self.make_key)

    def recall(self, message: Recall, _: list[Frame]) -> None:
        self.templates.recall(self.find_key(message.template))

    def stop(self, _: Stop, __: list[Frame]) -> None:
        self.is_stopped = True

    # beside the steps, in a worker of one process

    def do_now(self, message: Chore, frames: list[Frame]) -> None:
        self.interrupt()
        self.chores.do(message, frames)

    def do_later(self, message: Chore, frames: list[Frame]) -> None:
        """But pictures on the way, which somebody looks at meanwhile, at once."""
        if isinstance(message, Finish) and message.partial is not None:
            self.do_now(message, frames)
        else:
            self.chores.add(message, frames)

    def do_chores(self) -> None:
        """Between two static batches, until there is nothing more to do before the next. What is away is waited for,
        but not for long: some of it is no longer wanted, and some waits in the cluster for the rest of its group."""
        waits_until = time.monotonic() + LONGEST_TRIP
        while not (self.engine.jobs or self.is_stopped):
            if queue := self.chores.due(self.num_waiting):
                message, frames = queue.popleft()
                if self.chores.do(message, frames):
                    self.chores.away.add(message.id)
                waits_until = time.monotonic() + LONGEST_TRIP
            elif not self.chores.away or time.monotonic() > waits_until:
                self.chores.away.clear()
                return
            self.hear(wait=bool(self.chores.away) and not self.chores.due(self.num_waiting))

    # steps

    def join(self) -> None:
        """Groups join whole, the oldest first, as far as there is room; who still waits for a template is passed by."""
        self.settle()
        if not self.engine.jobs:
            self.engine.max_jobs = self.config.max_batch_size  # whatever did not fit is gone
        self.split_first()
        settled = [group for group in self.waiting if is_settled(group)]
        if not settled:
            return
        groups = ([self.ask(running.job) for running in group] for group in settled)
        inside = [self.ask(job) for job in self.engine.jobs]
        num_waiting = sum(map(len, settled))
        num = num_joining(groups, num_waiting, inside, self.engine.max_jobs, self.config.batching, self.costs)
        for group in settled[:num]:
            self.waiting.remove(group)
            for running in group:
                running.joined_at = time.perf_counter()
                self.running[running.job] = running
                self.engine.join(running.job)
            plans = tuple(running.job.plan for running in group)
            self.line.send(Joined(tuple(running.progress for running in group), plans))

    def ask(self, job: Job) -> Asking:
        return Asking(mean_price(job, self.costs), job.num_steps - job.step)

    def split_first(self) -> None:
        """A group that would wait for room longer than it takes itself is split: those go for whom there is room."""
        first = next((group for group in self.waiting if is_settled(group)), [])
        room = self.engine.max_jobs - len(self.engine.jobs)
        if not (self.engine.jobs and 0 < room < len(first)):
            return
        left = sorted(job.num_steps - job.step for job in self.engine.jobs)
        num_leaving = min(len(first) - room, len(left))
        if left[num_leaving - 1] > max(running.job.num_steps for running in first):
            place = self.waiting.index(first)
            self.waiting[place] = first[room:]
            self.waiting.insert(place, first[:room])

    def settle(self) -> None:
        """What was fetched for waiting jobs is theirs."""
        for group in self.waiting:
            for running in [running for running in group if running.fetching]:
                self.settle_one(running, group)
        self.waiting = deque(group for group in self.waiting if group)

    def settle_one(self, running: Running, group: list[Running]) -> None:
        assert running.fetching
        key, outcome = running.fetching.key, running.fetching.outcome
        if outcome is Outcome.LOADING or (outcome is Outcome.REFUSED and self.will_have_room()):
            return
        running.fetching = None
        if outcome is Outcome.ABSENT and running.is_sure:
            self.line.send(Missing(running.id, running.attempt, key.picture))
            group.remove(running)
        elif isinstance(outcome, Outcome):
            self.line.send(Found(running.id, running.attempt, None))
        else:
            running.job = reuse(running.job, make_activations(key, outcome.span, self.model))
            running.key = key
            self.templates.pin(key)
            self.line.send(Found(running.id, running.attempt, self.templates.where(running.id, outcome)))

    def will_have_room(self) -> bool:
        """For other templates, when those in use no longer are."""
        settled = (running for group in self.waiting if is_settled(group) for running in group)
        return any(running.key for running in (*self.running.values(), *settled))

    def step(self) -> None:
        jobs = self.engine.pick()
        before = {job: job.latents for job in jobs if job.step + 1 in self.running[job].partials}
        predicted = self.costs.step(price_of(job, self.costs) for job in jobs)
        start = time.perf_counter()
        failed = self.advance(jobs)
        self.synchronize()
        seconds = time.perf_counter() - start
        for job, error in failed.items():
            self.engine.leave(job)
            self.line.send(failure(self.running[job].id, self.running[job].attempt, error))
            self.leave(self.running[job])
        steps = tuple(self.running[job].progress for job in jobs if job not in failed)
        self.line.send(Stepped(seconds, predicted, self.num_interruptions, steps))
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
        facts = {"num_steps": job.num_steps, "num_computed_tokens": job.num_computed_tokens}
        traces.record(running.trace, "denoise", seconds, attempt=running.attempt, **facts)
        self.leave(running)
        if self.config.batching == "static":
            self.chores.away.add(running.id)

    def leave(self, running: Running) -> None:
        del self.running[running.job]
        self.release(running)

    def release(self, running: Running) -> None:
        if running.key is None:
            return
        self.templates.unpin(running.key)
        for group in self.waiting:
            for other in group:
                if other.fetching and other.fetching.outcome is Outcome.REFUSED:
                    self.templates.retry(other.fetching)

    def synchronize(self) -> None:
        """With what computes; loads for the next step go on."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def free_memory(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    # templates

    def accept_template(self, message: Register, frames: list[Frame]) -> None:
        known = self.registering.get(message.id)
        if known and known.attempt == message.attempt:
            known.is_urgent |= message.is_urgent
            return
        self.cancel(Cancel(message.id), [])  # an older attempt
        try:
            key = self.find_key(message.template)
            job = read_job(message.job, frames[: len(message.job.tensors)], self.model.device)
            picture = read_picture(frames[-1], message.picture) if message.picture else None
        except Exception as error:
            self.line.send(failure(message.id, message.attempt, error))
            return
        self.templates.pin(key)
        missing = self.templates.missing(key)
        self.registering[message.id] = Registering(message.attempt, key, job, message.is_urgent, missing, picture)

    def next_registering(self) -> tuple[str, Registering] | None:
        """A template that a job waits for; or any, while no job runs or is away. What is missing of it has to be
        known."""
        is_idle = not (self.engine.jobs or self.chores.away)
        known = ((name, one) for name, one in self.registering.items() if one.missing.done())
        return next((item for item in known if is_idle or item[1].is_urgent), None)

    def register(self, template: str, registering: Registering) -> None:
        """A few steps of a template."""
        self.interrupt()
        key = registering.key
        try:
            registration = self.registration_of(registering)
            registration.advance(self.model, self.templates.store)
        except Exception as error:
            self.cancel(Cancel(template), [])
            self.free_memory()
            self.line.send(failure(template, registering.attempt, error))
            return
        if registration.done:
            self.cancel(Cancel(template), [])
            if registering.picture is not None:
                self.templates.keep_picture(key, registering.picture)
            self.templates.report(key)
        progress = registration.num_registered_steps, key.num_steps
        self.line.send(Registered(template, registering.attempt, *progress, self.templates.memory_bytes(key)))

    def registration_of(self, registering: Registering) -> Registration:
        if registering.registration is None:
            registering.registration = Registration(registering.key, registering.job, registering.missing.result())
        return registering.registration


def is_settled(group: list[Running]) -> bool:
    return not any(running.fetching for running in group)


def partial_steps(num_steps: int, num_partials: int) -> tuple[int, ...]:
    """Steps after which to show a picture: spread evenly, the last step not among them."""
    steps = (num_steps * (index + 1) // (num_partials + 1) for index in range(num_partials))
    return tuple(dict.fromkeys(step for step in steps if 0 < step < num_steps))


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    Denoiser(config, model, line).run()


if __name__ == "__main__":
    run_process(serve, PARTS)

"""The registrar of a worker: registers templates between steps, a few steps of one template at a time.

It works while no job runs, or while a job waits for the template. A registration that a client asked for has a share of
the time beside the running jobs, and any other one that has waited through many steps a smaller one, so that a busy
worker fills its cache too.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from instgenie.cluster.wire import Frame, Register, Registered, read_picture
from instgenie.engine.loop import free_memory
from instgenie.engine.register import Registration
from instgenie.jobs.activations import Key
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Pixels
from instgenie.workers.frames import read_job
from instgenie.workers.line import Line
from instgenie.workers.process import failure
from instgenie.workers.templates import Templates

MAX_STEPS_WAITED = 200  # steps of the running jobs after which a registration waits for no idle moment
SHARE = 0.2  # of the time, for registrations that have waited so long
ASKED_SHARE = 0.35  # of the time, for registrations that a client asked for, from their first step on


class TemplateAttempt(NamedTuple):
    """One of the attempts that a registration answers."""

    id: str
    attempt: int
    request_id: str


@dataclass(eq=False)
class PendingTemplate:
    """A template that is to be registered, or is being registered."""

    id: str
    attempts: list[int]  # one, unless several fronts ask for the template
    key: Key
    job: Job
    is_urgent: bool  # True if an edit waits for it
    missing: Future[list[range]]  # spans that no tier has
    picture: Pixels | None  # to keep beside the activations
    since: int  # steps that the worker had taken when it came
    request_id: str
    is_asked_for: bool  # by a client
    registration: Registration | None = None  # None until the missing spans are known


class Registrar:
    def __init__(self, model: Model, templates: Templates, line: Line) -> None:
        self.model, self.templates, self.line = model, templates, line
        self.pending: dict[str, PendingTemplate] = {}  # by template id
        self.num_steps = 0  # taken by jobs
        self._step_seconds = 0.0  # spent on steps of jobs since the last span
        self._span_seconds = 0.0  # spent on the last span

    def stepped(self, seconds: float) -> None:
        """Note a step of the running jobs."""
        self.num_steps += 1
        self._step_seconds += seconds

    def accept(self, message: Register, frames: list[Frame]) -> None:
        if known := self.pending.get(message.id):  # another attempt has the same result
            known.is_urgent |= message.is_urgent
            known.is_asked_for |= message.is_asked_for
            known.attempts += [message.attempt] if message.attempt not in known.attempts else []
            return
        try:
            key = self.templates.keys.find(message.template)
            job = read_job(message.job, frames[: len(message.job.tensors)], self.model.device)
            picture = read_picture(frames[-1], message.picture) if message.picture else None
        except Exception as error:
            self.line.send(failure(message, error))
            return
        self.templates.fetcher.pin(key)
        missing = self.templates.missing(key)
        self.pending[message.id] = PendingTemplate(
            id=message.id,
            attempts=[message.attempt],
            key=key,
            job=job,
            is_urgent=message.is_urgent,
            missing=missing,
            picture=picture,
            since=self.num_steps,
            request_id=message.request_id,
            is_asked_for=message.is_asked_for,
        )

    def cancel(self, id: str) -> None:
        if pending := self.pending.pop(id, None):
            self.templates.fetcher.unpin(pending.key)

    def next(self, is_idle: bool) -> PendingTemplate | None:
        """The template to work on now: an urgent one, any one if the worker is idle, or one that has waited too long.
        Templates whose missing spans are not yet known are passed over."""
        known = [pending for pending in self.pending.values() if pending.missing.done() and self.has_room(pending)]
        now = [pending for pending in known if is_idle or pending.is_urgent]
        return next(iter(now or self._overdue(known)), None)

    def _overdue(self, known: Sequence[PendingTemplate]) -> Iterator[PendingTemplate]:
        """Yield those that may take time from the running jobs."""
        for pending in known:
            share = ASKED_SHARE if pending.is_asked_for else SHARE
            is_due = pending.is_asked_for or self.num_steps - pending.since >= MAX_STEPS_WAITED
            if is_due and self._span_seconds * (1 - share) <= self._step_seconds * share:
                yield pending

    def has_room(self, pending: PendingTemplate) -> bool:
        """Return False while memory is full of templates that are about to be written. While one registration waits for
        that, no other begins."""
        if pending.registration is None:
            return all(self.has_room(other) for other in self.pending.values() if other.registration)
        return pending.registration.has_room(self.templates.store)

    def advance(self, pending: PendingTemplate) -> None:
        """Register the next span of a template, and note how long that took."""
        start = time.perf_counter()
        self._advance(pending)
        self._span_seconds, self._step_seconds = time.perf_counter() - start, 0.0

    def _advance(self, pending: PendingTemplate) -> None:
        key = pending.key
        try:
            registration = self.registration_of(pending)
            registration.advance(self.model, self.templates.store)
        except Exception as error:
            self.cancel(pending.id)
            free_memory(self.model.device)
            for attempt in pending.attempts:
                self.line.send(failure(TemplateAttempt(pending.id, attempt, pending.request_id), error))
            return
        if registration.done:
            self.cancel(pending.id)
            if pending.picture is not None:
                self.templates.store.put_picture(key, pending.picture, pending.is_asked_for)
            elif pending.is_asked_for:
                self.templates.ask_for(key)
            self.templates.report(key)
        progress = registration.num_registered_steps, key.num_steps
        for attempt in pending.attempts:
            self.line.send(Registered(pending.id, attempt, *progress, self.templates.memory_bytes(key)))

    def registration_of(self, pending: PendingTemplate) -> Registration:
        if pending.registration is None:
            pending.registration = Registration(key=pending.key, job=pending.job, missing=pending.missing.result())
        return pending.registration

"""The second branches of a worker's edits, which its companion computes. Latents go out when a step begins; the loop
waits for predictions when it has its own."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from instgenie.cluster.orders import GuidanceFacts
from instgenie.cluster.wire.guidance import (
    GREETING,
    AskBranches,
    BranchesReady,
    BranchesRefused,
    BranchStep,
    CloseBranch,
    Greet,
    Greeted,
    OpenBranch,
    read_guidance,
)
from instgenie.engine.guidance import can_split, split, unite
from instgenie.engine.loop import Engine
from instgenie.jobs.job import Branch, Job
from instgenie.machine.pages import to_device
from instgenie.workers.control_link import ControlLink, Reply
from instgenie.workers.controls import SECONDS_BETWEEN_BEATS, to_host
from instgenie.workers.errors import StepLostError
from instgenie.workers.frames import job_frames, read_tensor, tensor_frame, tensor_head

SECONDS_TO_WAIT = 30.0  # for another companion, after which an edit goes on without one
MAX_REPEATS = 5  # of an edit's steps, likewise


log = logging.getLogger(__name__)


class BranchLostError(StepLostError):
    """The prediction of a second branch does not come."""


@dataclass(eq=False)
class FarJob:
    """What is known of a job whose second branch is elsewhere."""

    id: str
    branches: tuple[Branch, ...]  # all of them
    second: Job  # at its first step, to open it with
    opened_at: int = -1  # the number of the companion that knows it, counted by losses
    kept: dict[int, Tensor] = field(default_factory=dict)  # latents at dense steps whose activations may be needed
    lost_at: float | None = None  # when it began to wait for another companion
    num_repeats: int = 0  # of its steps
    answer: tuple[Reply, int] | None = None  # of its present step, and its place there


class Companion:
    """The jobs that are split between this worker and its companion."""

    def __init__(
        self, address: str, wake: Callable[[], None] = lambda: None, keep_alive: Callable[[], None] = lambda: None
    ) -> None:
        """`wake` is called when something has come, `keep_alive` again and again while a step waits."""
        self.keep_alive = keep_alive
        self.num_split = self.num_opened = self.num_lost = 0
        self._jobs: WeakKeyDictionary[Job, FarJob] = WeakKeyDictionary()
        self._tickets, self._ids = count(), count()
        self.link = ControlLink(address, wake, self._lost, read_guidance, "companion of this worker")
        self._greeting = self._greet(self.link)

    @property
    def is_up(self) -> bool:
        return self._greeting.come.is_set() and isinstance(self._greeting.message, Greeted)

    def split(self, job: Job) -> Job:
        """The job with its first branch alone, if the companion can compute the other one; else the job itself."""
        if not (self.is_up and can_split(job)):
            return job
        first, second = split(job)
        far = self._jobs[first] = FarJob(f"{id(self):x}-{next(self._ids)}", job.branches, second)
        self._open(first, far)
        self.num_split += 1
        return first

    def unite(self, job: Job) -> Job:
        """The job with all of its branches."""
        branches = self._jobs[job].branches
        self.close(job)
        return unite(job, branches)

    def close(self, job: Job) -> None:
        if far := self._jobs.pop(job, None):
            self.link.tell(CloseBranch(far.id))

    def stop(self) -> None:
        self.link.close()

    # losses

    def awaits(self, job: Job) -> bool:
        """Return whether a job that has lost its companion has to wait for another one."""
        far = self._jobs.get(job)
        if far is None or far.lost_at is None:
            return False
        if self.is_up:
            far.lost_at = None
        return not self.is_up

    def repeat(self, job: Job) -> None:
        """Note that a step of a job is repeated."""
        if far := self._jobs.get(job):
            far.num_repeats += 1

    def is_given_up(self, job: Job) -> bool:
        """Return whether a job goes on without a companion, after it has waited too long or too often."""
        far = self._jobs.get(job)
        if far is None:
            return False
        has_waited = far.lost_at is not None and time.monotonic() - far.lost_at > SECONDS_TO_WAIT
        return has_waited or far.num_repeats > MAX_REPEATS

    def _greet(self, link: ControlLink) -> Reply:
        return link.ask(GREETING, Greet(), lambda: ())

    def _lost(self, link: ControlLink) -> None:
        """Note, in the link's thread, that the companion has died: greet the next one, which knows no job."""
        self.num_lost += 1
        self._greeting = self._greet(link)

    # steps

    @torch.inference_mode()
    def begin(self, jobs: Sequence[Job]) -> None:
        split = [(job, far) for job in jobs if (far := self._jobs.get(job))]
        if not split:
            return
        for job, far in split:
            if not self.is_up:
                self._lose(far, "it has died")
            if far.opened_at != self.num_lost:
                self._open(job, far)
            if job.keeps_activations:
                far.kept = {step: kept for step, kept in far.kept.items() if step == job.kept_step}
                far.kept[job.step] = job.latents
        steps = tuple(BranchStep(far.id, job.step, job.in_dense_steps, tensor_head(job.latents)) for job, far in split)
        ticket = next(self._tickets)
        staged, after = to_host([job.latents for job, _ in split])
        reply = self.link.ask(ticket, AskBranches(ticket, steps), lambda: [tensor_frame(one) for one in staged], after)
        for number, (_, far) in enumerate(split):
            far.answer = reply, number

    def _open(self, job: Job, far: FarJob) -> None:
        head, frames = job_frames(far.second)
        kept, latents = job.kept_step, None
        if kept is not None:
            latents = tensor_head(far.kept[kept])
            frames = [*frames, tensor_frame(far.kept[kept])]
        far.opened_at = self.num_lost
        self.num_opened += 1
        self.link.tell(OpenBranch(far.id, head, job.own_steps is not None, kept, latents), lambda: frames)

    def result(self, job: Job, like: Tensor) -> Sequence[Tensor]:
        """Waits for the companion, and gives signs of life meanwhile."""
        far = self._jobs.get(job)
        if far is None or far.answer is None:
            return ()
        reply, number = far.answer
        while not reply.come.wait(SECONDS_BETWEEN_BEATS):
            self.keep_alive()
        message = reply.message
        if not isinstance(message, BranchesReady):
            for other in self._jobs.values():
                if other.answer and other.answer[0] is reply:
                    other.opened_at = -1
            self._lose(far, message.message if isinstance(message, BranchesRefused) else "it has died")
        found = to_device(read_tensor(message.tensors[number], reply.frames[number]), job.device)
        return (found[job.inside] if len(found) > len(like) else found,)  # it had no room to keep anything

    def _lose(self, far: FarJob, why: str) -> NoReturn:
        far.opened_at, far.lost_at = -1, far.lost_at or time.monotonic()
        raise BranchLostError(f"the companion does not answer: {why}")


class SplitUser(Protocol):
    """A job that may be split."""

    id: str
    job: Job
    guidance: GuidanceFacts | None


SplitUserT = TypeVar("SplitUserT", bound=SplitUser)


def split_branches(companion: Companion | None, user: SplitUser) -> None:
    """Give the second branch of a job that joins the batch to the companion, if it can take it."""
    whole = user.job
    if companion and (first := companion.split(whole)) is not whole:
        user.job, user.guidance = first, GuidanceFacts()


def settle_branches(companion: Companion | None, running: dict[Job, SplitUserT], engine: Engine) -> None:
    """Let jobs wait that have lost their companion, and go on alone if none comes."""
    for job, user in list(running.items()) if companion else ():
        assert companion
        job.awaits_branch = companion.awaits(job)
        if companion.is_given_up(job):
            engine.leave(job)
            del running[job]
            user.job = companion.unite(job)
            user.job.awaits_branch = False
            user.guidance = replace(user.guidance or GuidanceFacts(), is_alone=True)
            running[user.job] = user
            engine.join(user.job, may_choose=False)  # it has waited for room with one branch


def repeats_branch(companion: Companion | None, user: SplitUser, error: Exception, engine: Engine) -> bool:
    """Return whether a job goes on after a step that failed, because its companion has died."""
    if not (companion and isinstance(error, BranchLostError)):
        return False
    companion.repeat(user.job)
    facts = user.guidance or GuidanceFacts()
    user.guidance = replace(facts, num_repeats=facts.num_repeats + 1)
    engine.join(user.job)
    log.warning("a step is repeated: %s", error, extra={"job": user.id, "step": user.job.step})
    return True

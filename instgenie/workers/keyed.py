"""Jobs with an idempotency key, in the step loop that runs them. A job whose key is known is not run a second time: it
follows the one that runs, or gets its latents, which are held for a while after the last step. So an edit whose front
died is denoised once, whichever front asks for it again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from instgenie.cluster.wire import (
    Denoise,
    Denoised,
    Denoising,
    Frame,
    JobHead,
    JobStep,
    Joined,
    TierFound,
    split_frames,
)
from instgenie.scheduling.terms import Terms
from instgenie.workers.line import Line
from instgenie.workers.locker import Locker
from instgenie.workers.queue import TrackedJob, terms_of

AnswerT = TypeVar("AnswerT", TierFound, Denoised)


@dataclass(frozen=True, eq=False)
class HeldLatents:
    """The result of a job, and all that was said about it."""

    job: JobHead
    found: TierFound | None
    plan: tuple[bool, ...]
    num_steps: int
    denoised: Denoised
    frame: Frame


class KeyedJobs:
    def __init__(self, line: Line, held: Locker[HeldLatents]) -> None:
        self.line = line
        self.running: dict[str, tuple[JobHead, TrackedJob]] = {}  # by key; they wait or take steps
        self.held = held  # by key

    def take_known(self, message: Denoise, frames: Sequence[Frame]) -> tuple[Denoise, Sequence[Frame]]:
        """Answer for the jobs whose keys are known, and return those that are to be run."""
        if not any(given.key for given in message.jobs):
            return message, frames
        new: list[Denoising] = []
        new_frames: list[Frame] = []
        for given, own in zip(message.jobs, split_frames(frames, message.jobs), strict=True):
            if not (given.key and self._join(given)):
                new.append(given)
                new_frames += own
        return Denoise(tuple(new)), new_frames

    def note(self, given: Sequence[Denoising], accepted: Sequence[TrackedJob]) -> None:
        """Note those of the accepted jobs that have a key."""
        heads = {one.id: one.job for one in given}
        self.running |= {tracked.key: (heads[tracked.id], tracked) for tracked in accepted if tracked.key}

    def _join(self, given: Denoising) -> bool:
        """Let a job follow the one with its key, unless it is another job after all."""
        if given.key in self.running:
            head, tracked = self.running[given.key]
            if is_same(head, given.job):
                self._follow(tracked, given)
                return True
        elif (held := self.held.get(given.key)) and is_same(held.job, given.job):
            self._hand_out(held, given)
            return True
        return False

    def _follow(self, tracked: TrackedJob, given: Denoising) -> None:
        tracked.followers.append(given)
        tracked.terms = shared_terms(tracked.terms, terms_of(given), time.monotonic())
        if tracked.found:
            self.line.send(addressed(tracked.found, given))
        if tracked.joined_at and not tracked.is_preempted:
            self.line.send(Joined((JobStep(given.id, given.attempt, tracked.job.step),), (tracked.job.plan,)))

    def _hand_out(self, held: HeldLatents, given: Denoising) -> None:
        if held.found:
            self.line.send(addressed(held.found, given))
        self.line.send(Joined((JobStep(given.id, given.attempt, held.num_steps),), (held.plan,)))
        self.line.send(addressed(held.denoised, given), [held.frame])

    def leave(self, tracked: TrackedJob) -> None:
        """Note that a job ended or was cancelled."""
        if self._is_first(tracked):
            del self.running[tracked.key]

    def _is_first(self, tracked: TrackedJob) -> bool:
        """True if the jobs with its key follow this one, and not another job that has come with the same key."""
        return self.running.get(tracked.key, (None, None))[1] is tracked

    def hold(self, tracked: TrackedJob, denoised: Denoised, frame: Frame) -> None:
        """Keep the latents of a job for whoever asks with its key."""
        if not self._is_first(tracked):
            return
        job = tracked.job
        held = HeldLatents(
            job=self.running[tracked.key][0],
            found=tracked.found,
            plan=job.plan,
            num_steps=job.num_steps,
            denoised=denoised,
            frame=frame,
        )
        self.held.put(tracked.key, held, len(frame))

    def give_up(self, id: str) -> bool:
        """Note that an asker no longer wants its job. Return whether another still does: then the job runs on."""
        for _, tracked in self.running.values():
            for follower in tracked.followers:
                if id in (follower.id, tracked.id):
                    tracked.followers.remove(follower)
                    if id == tracked.id:
                        tracked.id, tracked.attempt = follower.id, follower.attempt
                    return True
        return False


def shared_terms(one: Terms, other: Terms, now: float) -> Terms:
    """The terms of a job that two ask for: the more urgent ones. A deadline that has passed does not count."""
    deadlines = one.deadline, other.deadline
    deadline = min((deadline for deadline in deadlines if deadline > now), default=max(deadlines))
    return one._replace(deadline=deadline, priority=min(one.priority, other.priority))


def is_same(one: JobHead, other: JobHead) -> bool:
    """True if two jobs come from the same edit. Their tensors then are the same, since preparing is deterministic."""
    return identity(one) == identity(other)


def identity(head: JobHead) -> tuple[object, ...]:
    return head.edit, head.grid, head.schedule_kind, bytes(head.schedule)


def addressed(message: AnswerT, given: Denoising) -> AnswerT:
    return msgspec.structs.replace(message, id=given.id, attempt=given.attempt)

"""The memory in which running jobs keep what their own dense steps, or their blocks, leave behind. Jobs wait for it
before they join the batch, so that it never runs out in the middle of a step."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from instgenie.engine.changed import Changed
from instgenie.engine.own import can_reuse_own, reuse_own, room_bytes
from instgenie.jobs.job import Job
from instgenie.models.model import Model


class OwnRoom:
    def __init__(self, model: Model, max_bytes: int, num_text: int = 0, changed: Changed | None = None) -> None:
        self.model, self.max_bytes, self.num_text = model, max_bytes, num_text
        self.changed = changed  # chooses what blocks compute, and knows what they keep
        self.network = model.describe()

    def bytes_of(self, job: Job) -> int:
        own_bytes = self.own_bytes(job)
        return own_bytes + (self.changed.bytes_of(job, own_bytes) if self.changed else 0)

    def own_bytes(self, job: Job) -> int:
        return room_bytes(job, self.model, self.network, num_text=self.num_text) if job.own_steps else 0

    def reuse_own(self, job: Job) -> Job:
        """The job with own reuse, if that saves any work and there will ever be room for it."""
        if not can_reuse_own(job):
            return job
        own = reuse_own(job)
        return own if self.own_bytes(own) <= self.max_bytes else job

    def cut(self, jobs: Sequence[Job]) -> Iterator[int]:
        """Cut jobs into parts that find room together, and yield the length of each part."""
        num_jobs = num_bytes = 0
        for job in jobs:
            needed = self.bytes_of(job)
            if num_jobs and num_bytes + needed > self.max_bytes:
                yield num_jobs
                num_jobs = num_bytes = 0
            num_jobs, num_bytes = num_jobs + 1, num_bytes + needed
        if num_jobs:
            yield num_jobs

    def grant(
        self, groups: Iterable[Sequence[Job]], running: Iterable[Job], preempted: Collection[Job] = ()
    ) -> Iterator[bool]:
        """Say for each group, in the order of arrival, whether it finds room beside the running jobs and the groups
        before it. Behind a group that does not, only groups that need no room may join, and those of preempted jobs:
        these hold what their dense steps left until they end, and wait for the rows of their blocks alone."""
        used = sum(map(self.bytes_of, running)) + sum(map(self.own_bytes, preempted))
        is_full = False
        for jobs in groups:
            goes_on = any(job in preempted for job in jobs)
            needed = sum(self.bytes_of(job) - (self.own_bytes(job) if goes_on else 0) for job in jobs)
            fits = not used or used + needed <= self.max_bytes
            is_granted = needed == 0 or (fits and (goes_on or not is_full))
            is_full |= not is_granted
            used += needed if is_granted else 0
            yield is_granted

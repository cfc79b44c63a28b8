"""Branches of jobs that are computed elsewhere. Classifier-free guidance has two branches, which meet only in the
prediction of a step: the step loop computes the first, and somebody else the second."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from instgenie.cost.plan import DENSE
from instgenie.jobs.job import Branch, Job


class FarBranches(Protocol):
    """Gives jobs the predictions of the branches that they do not have themselves."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begin to compute the present step of the jobs' other branches."""
        ...

    def result(self, job: Job, like: Tensor) -> Sequence[Tensor]:
        """Predictions of a job's other branches for the step that has begun, for the tokens of `like`; none if it has
        all of them itself."""
        ...


class NoFarBranches:
    """All jobs have all of their branches."""

    def begin(self, jobs: Sequence[Job]) -> None:
        pass

    def result(self, job: Job, like: Tensor) -> Sequence[Tensor]:
        return ()


def can_split(job: Job) -> bool:
    """Return whether the branches of a job can be computed apart. What a template keeps is near one device; LoRAs and
    residuals of ControlNets are, too; and a job that watches how its activations or predictions change needs all."""
    is_plain = not (job.edit.loras or job.controls or job.edit.max_change or job.reuses_changed)
    has_template = job.activations is not None and job.own_steps is None
    return len(job.branches) == 2 and not job.step and is_plain and not has_template


def split(job: Job) -> tuple[Job, Job]:
    """Two jobs at their first step, each with one of the branches."""
    lengths = [len(one.text) if one.num_prompt is None else one.num_prompt for one in job.branches]
    first, second = (replace(branch, num_prompt=max(lengths)) for branch in job.branches)
    return with_branches(job, first), with_branches(job, second)


def unite(job: Job, branches: Sequence[Branch]) -> Job:
    """The job with all of its branches, as it goes on where it is. If it reads what its dense steps left behind, its
    present step becomes a dense one: of the other branch there is nothing."""
    return with_branches(job, *branches)


def with_branches(job: Job, *branches: Branch) -> Job:
    return replace(job, branches=branches, activations=None, plan=DENSE, kept_step=None)

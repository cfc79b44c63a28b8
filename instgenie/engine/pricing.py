"""Prices of jobs: what a step of a job costs on the model's device. Knows models and jobs; `instgenie.cost.pricing`
makes the table that prices are read from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from instgenie.cost.latency import find_latency
from instgenie.cost.network import VALUE_BYTES
from instgenie.cost.pricing import JobShape, make_costs
from instgenie.cost.table import Guided, Price, StepCosts
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import text_bucket
from instgenie.machine.device import device_name
from instgenie.models.model import Model
from instgenie.scheduling.terms import NO_TERMS, PricedJob, Terms
from instgenie.types import CacheDtype, Edit, PlanPolicy, TierName

NO_PICTURE, NO_MASK = np.empty((0, 0, 3), np.uint8), np.empty((0, 0), np.bool_)


def price_steps(
    model: Model, name: str, policy: PlanPolicy, dtype: CacheDtype, stride: int = 1, keeps_text: bool = False
) -> StepCosts:
    """Make the cost table of a model from its calibration on this device, or from default latencies without one. The
    calibration is found by the `name` the model was loaded by."""
    latency = find_latency(device_name(model.device), name, model.device.type)
    shape = job_shape(model, VALUE_BYTES.get(dtype, model.dtype.itemsize), stride, keeps_text)
    num_tokens = (model.own_size // model.patch) ** 2
    return make_costs(shape, latency, policy, num_tokens, is_host_near=model.device.type == "cpu")


def job_shape(model: Model, value_bytes: float, stride: int = 1, keeps_text: bool = False) -> JobShape:
    """Describe jobs that use the model's defaults. Prompts are short: where padding is read, the fewest tokens that a
    prompt may have are computed."""
    edit = Edit(NO_PICTURE, NO_MASK, "", guidance=model.guidance)
    side = model.own_size // model.patch
    num_kept = model.num_kept_text([(side, side)] if model.sees_picture else [], keeps_text)
    num_prompt = model.num_text_tokens - num_kept or text_bucket(1, num_kept)
    return JobShape(
        network=model.describe(),
        num_text=model.num_text_tokens,
        num_branches=2 if model.guidance_scale(edit) > 1 else 1,
        value_bytes=value_bytes,
        stride=stride,
        num_steps=model.steps,
        sees_picture=model.sees_picture,
        num_prompt=num_prompt if num_kept else 0,
    )


def price_of(job: Job, costs: StepCosts) -> Price:
    """Price of the job's current step."""
    tier = None if job.in_dense_steps else tier_of(job)
    price = costs.price(len(job.masked), num_computed(job, tier), tier)
    guiding = [control.use for control in job.controls if control.use.guides(job.step, job.num_steps)]
    return costs.guided(price, len(job.masked), [Guided(use.version) for use in guiding])


def priced(job: Job, costs: StepCosts, terms: Terms = NO_TERMS, num_overtaken: int = 0) -> PricedJob:
    """The job as the scheduler sees it, with the mean price of its remaining steps."""
    tier, num_left = tier_of(job), job.num_steps - job.step
    price = costs.mean_price(len(job.masked), num_computed(job, tier), tier, num_dense_left(job), num_left)
    uses = [control.use for control in job.controls]
    guided = [Guided(use.version, use.share(job.num_steps, job.step)) for use in uses]
    return PricedJob(costs.guided(price, len(job.masked), guided), num_left, terms, num_overtaken, job.step)


@dataclass(frozen=True, eq=False)
class SingleJob:
    """A waiting job as a group of its own, which is ready to join."""

    job: Job
    is_ready: ClassVar[bool] = True
    is_overdue: ClassVar[bool] = False
    num_jobs: ClassVar[int] = 1

    def priced(self, costs: StepCosts) -> Sequence[PricedJob]:
        return [priced(self.job, costs)]


def num_dense_left(job: Job) -> int:
    """Dense steps among those that a job has still to take, as far as they are known."""
    if job.own_steps is None:
        return min(max(job.edit.dense_steps - job.step, 0), job.num_steps - job.step)
    return max(sum(step >= job.step for step in job.own_steps.steps), int(job.kept_step is None))


def tier_of(job: Job) -> TierName | None:
    """The memory tier that holds its activations; None if it has none. Its own are on its device."""
    if job.own_steps:
        return "gpu"
    if job.activations is None:
        return None
    return "gpu" if job.activations.rows[0].device == job.masked.device else "host"


def num_computed(job: Job, tier: TierName | None) -> int:
    return len(job.masked) - len(job.outside) if tier else len(job.masked)

"""What steps of a model cost on its device, for the router. Knows models; `instgenie.cost.pricing` makes the
table."""

import numpy as np

from instgenie.cost.latency import find_latency
from instgenie.cost.pricing import JobShape, make_costs
from instgenie.cost.table import Price, StepCosts
from instgenie.jobs.job import Job
from instgenie.machine.names import device_name
from instgenie.models.model import Model
from instgenie.types import CacheDtype, Edit, PlanPolicy, TierName

NO_PICTURE, NO_MASK = np.empty((0, 0, 3), np.uint8), np.empty((0, 0), np.bool_)


def price_steps(model: Model, name: str, policy: PlanPolicy, dtype: CacheDtype) -> StepCosts:
    """With what was measured of this device and this model, by its name, or with what is usual."""
    latency = find_latency(device_name(model.device), name, model.device.type)
    shape = job_shape(model, 1 if dtype == "fp8" else model.dtype.itemsize)
    num_tokens = (model.own_size // model.patch) ** 2
    return make_costs(shape, latency, policy, num_tokens, is_host_near=model.device.type == "cpu")


def job_shape(model: Model, value_bytes: int) -> JobShape:
    """Of edits that ask for nothing but what the model gives."""
    edit = Edit(NO_PICTURE, NO_MASK, "", guidance=model.guidance)
    return JobShape(
        network=model.describe(),
        num_text=model.num_text_tokens,
        num_branches=2 if model.guidance_scale(edit) > 1 else 1,
        value_bytes=value_bytes,
    )


def price_of(job: Job, costs: StepCosts) -> Price:
    """Of its present step."""
    tier = None if job.in_dense_steps else tier_of(job)
    return costs.price(len(job.masked), num_computed(job, tier), tier)


def mean_price(job: Job, costs: StepCosts) -> Price:
    """Of a step, in the mean over those that are left."""
    tier, num_left = tier_of(job), job.num_steps - job.step
    num_dense = min(max(job.edit.dense_steps - job.step, 0), num_left)
    return costs.mean_price(len(job.masked), num_computed(job, tier), tier, num_dense, num_left)


def tier_of(job: Job) -> TierName | None:
    """Where its activations are, if it has any."""
    if job.activations is None:
        return None
    return "gpu" if job.activations.rows[0].device == job.masked.device else "host"


def num_computed(job: Job, tier: TierName | None) -> int:
    return len(job.masked) - len(job.outside) if tier else len(job.masked)

"""What steps of a model cost on its device, for whoever chooses workers. Knows models; `instgenie.pricing` makes the
table."""

import numpy as np

from instgenie.activations import Activations
from instgenie.batch import Job
from instgenie.costs import Price, StepCosts, mix
from instgenie.latency import find_latency
from instgenie.models.device import device_name
from instgenie.models.flux_model import FluxModel
from instgenie.models.model import Model
from instgenie.pricing import JobShape, make_costs
from instgenie.types import CacheDtype, Edit, PlanPolicy

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
        num_text=model.max_text_tokens if isinstance(model, FluxModel) else model.tokenizer.model_max_length,
        num_branches=2 if model.guidance_scale(edit) > 1 else 1,
        value_bytes=value_bytes,
    )


def price_of(job: Job, costs: StepCosts) -> Price:
    """Of its present step."""
    if job.activations is None or job.step < job.edit.dense_steps:
        return dense_price(job, costs)
    return cached_price(job, job.activations, costs)


def mean_price(job: Job, costs: StepCosts) -> Price:
    """Of a step, in the mean over those that are left."""
    num_left, num_dense = job.num_steps - job.step, max(job.edit.dense_steps - job.step, 0)
    if job.activations is None or num_dense >= num_left:
        return dense_price(job, costs)
    dense, cached = dense_price(job, costs), cached_price(job, job.activations, costs)
    return mix(dense, cached, num_dense / num_left)


def dense_price(job: Job, costs: StepCosts) -> Price:
    return costs.price(len(job.masked), len(job.masked), None)


def cached_price(job: Job, activations: Activations, costs: StepCosts) -> Price:
    is_near = activations.rows[0].device == job.masked.device
    return costs.price(len(job.masked), len(job.masked) - len(job.outside), "gpu" if is_near else "host")

"""What an edit costs in a Flux transformer: floating-point operations of its blocks. Counts products; runs nothing."""

from collections.abc import Sequence

from diffusers import FluxTransformer2DModel

from instgenie.batch import Job
from instgenie.models.flux import num_blocks


def job_flops(transformer: FluxTransformer2DModel, job: Job) -> float:
    """All steps of a job as its plan and its dense steps have it, whatever step it is at."""
    num_dense = min(job.edit.dense_steps, job.num_steps) if any(job.plan) else job.num_steps
    return num_dense * step_flops(transformer, job, ()) + (job.num_steps - num_dense) * step_flops(
        transformer, job, job.plan
    )


def step_flops(transformer: FluxTransformer2DModel, job: Job, plan: Sequence[bool]) -> float:
    """One step of all branches of a job; blocks beyond the plan are dense."""
    total = 0.0
    projects = job.activations is not None and job.activations.kind == "y"
    for branch in job.branches:
        num_all, num_inside = (len(branch.text) + len(part) for part in (job.masked, job.inside))
        num_cached = sum(plan)
        total += (num_blocks(transformer) - num_cached) * block_flops(transformer, num_all, num_all)
        total += num_cached * block_flops(transformer, num_inside, num_all)
        total += num_cached * projects * 4 * len(job.outside) * width(transformer) ** 2  # K and V from Y
    return total


def block_flops(transformer: FluxTransformer2DModel, num_queries: int, num_keys: int) -> float:
    """A double and a single block have the same products: 12 squares of the width for each token that flows."""
    wide = width(transformer)
    return 24 * num_queries * wide**2 + 4 * num_queries * num_keys * wide


def width(transformer: FluxTransformer2DModel) -> int:
    return int(transformer.config.num_attention_heads * transformer.config.attention_head_dim)

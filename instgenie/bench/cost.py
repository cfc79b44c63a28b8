"""FLOPs of whole edits, counted from their plans and dense steps."""

from dataclasses import replace

from instgenie.cost.network import Demand, step_flops
from instgenie.engine.demand import make_demand
from instgenie.jobs.job import Job
from instgenie.models.model import Model


def job_flops(model: Model, job: Job) -> int:
    """Count the FLOPs of all steps of a job, whichever step it is at."""
    network = model.describe()
    dense = (False,) * len(network.blocks)
    if job.own_steps:
        num_dense, plan = len(job.own_steps.steps), (True,) * len(network.blocks)
        alone = replace(job, activations=None, plan=(), own_steps=None)
        num_prompt = job.num_prompt if job.activations and job.activations.num_text else 0
        in_gpu = frozenset(range(len(network.blocks)))
        demand = replace(make_demand(alone, network), kind="kv", in_gpu=in_gpu, num_prompt=num_prompt)
    else:
        num_dense = min(job.edit.dense_steps, job.num_steps) if any(job.plan) else job.num_steps
        demand, plan = make_demand(replace(job, step=num_dense), network), job.plan or dense
    costs = [step_flops(network, [demand], plan) for plan in (dense, plan)]
    return num_dense * costs[0] + (job.num_steps - num_dense) * costs[1]


def square_flops(model: Model, side: int, num_text: int) -> int:
    """Count the FLOPs of a dense step over a square picture."""
    network = model.describe()
    num_tokens = (side // model.patch) ** 2
    masked = {shape.side: num_tokens // shape.side**2 for shape in network.blocks}
    return step_flops(network, [Demand(num_tokens, masked, num_text)], (False,) * len(network.blocks))

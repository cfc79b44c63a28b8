"""Plans for the jobs of a batch, from the predicted latency of this device. Knows when a new plan is needed; the
planner knows which plan is best.

A plan that depends on the batch and the tier changes pictures a little, because a dense block lets unmasked tokens see
what masked ones become. So planning is optional: without it every block is cached, whatever else is in the batch.
"""

from collections.abc import Sequence

from instgenie.cost.latency import Latency, find_latency
from instgenie.cost.plan import Plan
from instgenie.cost.planner import Planned, plan_batch
from instgenie.engine.demand import make_demands
from instgenie.jobs.job import Job
from instgenie.machine.device import device_name
from instgenie.models.model import Model
from instgenie.types import PlanPolicy


class Planning:
    def __init__(self, model: Model, latency: Latency, policy: PlanPolicy = "exact") -> None:
        self.network = model.describe()
        self.latency = latency
        self.policy = policy
        self.planned: Planned | None = None
        self._inputs: object = None  # of the last plan
        self._is_steady = False  # True once the plan counts loads ahead

    def plan(self, jobs: Sequence[Job]) -> None:
        """Give one plan to all jobs that have activations. A new plan is made when the jobs, or the places of their
        activations, have changed, and once more at the step after that, when it is known how far loading is ahead."""
        inputs = plan_inputs(jobs)
        if not inputs:
            return
        if inputs != self._inputs:
            self.planned, self._inputs, self._is_steady = self.choose(jobs, 0.0), inputs, False
        elif not self._is_steady:
            assert self.planned is not None
            self.planned, self._is_steady = self.choose(jobs, self.planned.lead), True
        assert self.planned is not None
        set_plan(self.planned.plan, jobs)

    def choose(self, jobs: Sequence[Job], lead: float) -> Planned:
        return plan_batch(self.network, make_demands(jobs, self.network), self.latency, lead, self.policy)


def make_planning(model: Model, name: str, policy: PlanPolicy) -> Planning | None:
    """Plan with the calibration of this model on this device, found by the model's name, or with default latencies.
    None if every block is cached, which needs no planning."""
    if policy == "cached":
        return None
    return Planning(model, find_latency(device_name(model.device), name, model.device.type), policy)


def set_plan(plan: Plan, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.activations is not None:
            job.plan = plan


def plan_inputs(jobs: Sequence[Job]) -> list[tuple[Job, object, bool, int]]:
    """Everything that a plan depends on, to compare; empty if there is nothing to plan."""
    if not any(job.activations for job in jobs):
        return []
    return [(job, job.activations, job.in_dense_steps, job.step - jobs[0].step) for job in jobs]

"""Plans for the jobs of a batch, from what is predicted of this device. Knows when a plan has to be made anew; the
planner knows which is best.

A plan that follows the batch and the tier changes pictures a little, for a dense block lets unmasked tokens see what
masked ones become. So nobody plans unless asked to: without, every block is cached, whoever else is in the batch.
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
        self._described: object = None
        self._is_steady = False

    def plan(self, jobs: Sequence[Job]) -> None:
        """The same for all jobs that have activations. It is made anew when the jobs, or where their activations lie,
        have changed; and once more in the step behind, when it is known how far loading is ahead."""
        described = describe(jobs)
        if not described:
            return
        if described != self._described:
            self.planned, self._described, self._is_steady = self.choose(jobs, 0.0), described, False
        elif not self._is_steady:
            assert self.planned is not None
            self.planned, self._is_steady = self.choose(jobs, self.planned.lead), True
        assert self.planned is not None
        give(self.planned.plan, jobs)

    def choose(self, jobs: Sequence[Job], lead: float) -> Planned:
        return plan_batch(self.network, make_demands(jobs, self.network), self.latency, lead, self.policy)


def make_planning(model: Model, name: str, policy: PlanPolicy) -> Planning | None:
    """With what was measured of this device and this model, by its name, or with what is usual. None where every block
    is cached, as it is where nobody plans."""
    if policy == "cached":
        return None
    return Planning(model, find_latency(device_name(model.device), name, model.device.type), policy)


def give(plan: Plan, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.activations is not None:
            job.plan = plan


def describe(jobs: Sequence[Job]) -> list[tuple[Job, object, bool, int]]:
    """Equal while nothing changes that a plan depends on; nothing at all where nothing can be planned."""
    if not any(job.activations for job in jobs):
        return []
    return [(job, job.activations, job.in_dense_steps, job.step - jobs[0].step) for job in jobs]

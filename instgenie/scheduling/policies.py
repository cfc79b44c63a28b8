"""The policies by name."""

from collections.abc import Callable, Mapping

from instgenie.scheduling.names import Batching, Scheduling
from instgenie.scheduling.pace import Pace
from instgenie.scheduling.policy import EarliestDeadline, LeastSlack, Policy
from instgenie.scheduling.preemptive import Preemptive
from instgenie.scheduling.scheduler import SCHEDULERS, Scheduler
from instgenie.scheduling.shares import Shares

POLICIES: Mapping[Scheduling, Callable[[Scheduler, Pace, Shares], Policy]] = {
    "fcfs": Policy,
    "edf": EarliestDeadline,
    "slack": LeastSlack,
    "preemptive": Preemptive,
}


def make_policy(
    scheduling: Scheduling,
    batching: Batching = "continuous",
    pace: Pace | None = None,
    weights: Mapping[str, float] | None = None,
) -> Policy:
    """The policy of one worker. Ways of batching that exist to compare with are first come, first served."""
    kind = POLICIES[scheduling] if batching == "continuous" else Policy
    return kind(SCHEDULERS[batching], pace or Pace(), Shares(weights))

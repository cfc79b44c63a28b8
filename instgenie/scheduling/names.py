"""Names that users choose from: how a worker forms batches, who goes first, and how the router picks a worker."""

from typing import Literal

Batching = Literal["continuous", "static", "static-pipelined", "naive"]
Scheduling = Literal["preemptive", "slack", "edf", "fcfs"]  # see `scheduling.policy`
RoutingPolicy = Literal["mask_aware", "tokens", "requests", "round_robin"]

ONE_PROCESS: frozenset[Batching] = frozenset({"static", "naive"})  # the denoise process also prepares and finishes
DEFAULT_SCHEDULING: Scheduling = "preemptive"

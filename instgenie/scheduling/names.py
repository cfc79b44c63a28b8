"""Names that users choose from: how a worker forms batches, and how the router picks a worker."""

from typing import Literal

Batching = Literal["continuous", "static", "static-pipelined", "naive"]
RoutingPolicy = Literal["mask_aware", "tokens", "requests", "round_robin"]

ONE_PROCESS: frozenset[Batching] = frozenset({"static", "naive"})  # the denoise process also prepares and finishes

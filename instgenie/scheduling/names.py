"""The names of the ways in which a worker forms batches, and what each implies for its processes."""

from typing import Literal

Batching = Literal["continuous", "static", "static-pipelined", "naive"]

ONE_PROCESS: frozenset[Batching] = frozenset({"static", "naive"})  # the step loop's process prepares and finishes too
ONE_BATCH: frozenset[Batching] = frozenset({"static", "static-pipelined"})  # no job joins until the batch is done

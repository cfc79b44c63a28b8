"""A plan: for each block, cached or dense. Knows which plans are feasible; `planner` knows which is fastest.

A network is a sequence of runs, given by their lengths in blocks. All tokens flow into the first block of a run; inside
a run, unmasked tokens that a cached block with `kv` has dropped stay dropped.
"""

from collections.abc import Sequence
from itertools import accumulate

from instgenie.errors import PlanError
from instgenie.types import Kind

Plan = tuple[bool, ...]  # per block: True if it is cached
DENSE: Plan = ()  # the plan of a job without activations, for any number of blocks


def is_cached(plan: Plan, block: int) -> bool:
    """Return whether a block is cached. Past the last block, where a Flux computes velocities, the answer is whether
    any block was: then only masked tokens are left."""
    return plan[block] if block < len(plan) else any(plan)


def check_plan(plan: Plan, kind: Kind, run_lengths: Sequence[int]) -> None:
    """Raise a PlanError if the plan does not fit the network, or with `kv` needs tokens that it dropped before."""
    num_blocks = sum(run_lengths)
    if len(plan) != num_blocks:
        raise PlanError(f"the plan has {len(plan)} blocks, but the model has {num_blocks}")
    if kind == "kv" and (turn := dense_after_cached(plan, run_lengths)) is not None:
        cached, dense = turn
        raise PlanError(
            f"the plan runs block {dense} dense after block {cached} was cached: with kv, unmasked tokens "
            "that were dropped cannot come back; a dense prefix, then cached to the end, is expected"
            + (" of each transformer" if len(run_lengths) > 1 else "")
        )


def dense_after_cached(plan: Plan, run_lengths: Sequence[int]) -> tuple[int, int] | None:
    """The first cached block that is followed by a dense one in its run, and that dense block."""
    for end, length in zip(accumulate(run_lengths), run_lengths, strict=True):
        cached = next((block for block in range(end - length, end) if plan[block]), end)
        dense = next((block for block in range(cached, end) if not plan[block]), None)
        if dense is not None:
            return cached, dense
    return None


def run_starts(run_lengths: Sequence[int]) -> frozenset[int]:
    """The first block of each run."""
    return frozenset(sum(run_lengths[:run]) for run in range(len(run_lengths)))

"""Plans: for each block, cached or dense. Knows which plans are feasible; knows no tensor."""

from collections.abc import Sequence
from itertools import accumulate

from instgenie.activations import Kind
from instgenie.errors import PlanError

Plan = tuple[bool, ...]  # for each block: cached or not
DENSE: Plan = ()  # of a job without activations: no block is cached, however many there are


def is_cached(plan: Plan, block: int) -> bool:
    """After the last block of a Flux come the velocities: of masked tokens alone if anything was cached."""
    return plan[block] if block < len(plan) else any(plan)


def check_plan(plan: Plan, kind: Kind, units: Sequence[int]) -> None:
    """Units are runs of blocks, given by their lengths, in which tokens that were dropped stay dropped."""
    if len(plan) != sum(units):
        raise PlanError(f"the plan has {len(plan)} blocks: {sum(units)}, as many as the model, are expected")
    if kind == "kv" and (turn := dense_after_cached(plan, units)) is not None:
        cached, dense = turn
        raise PlanError(
            f"the plan runs block {dense} dense after block {cached} was cached: with kv, unmasked tokens "
            "that were dropped cannot come back; a dense prefix, then cached to the end, is expected"
            + (" of each transformer" if len(units) > 1 else "")
        )


def dense_after_cached(plan: Plan, units: Sequence[int]) -> tuple[int, int] | None:
    """The first cached block that has a dense one behind it in its unit, and that dense one."""
    for end, length in zip(accumulate(units), units, strict=True):
        blocks = range(end - length, end)
        cached = next((block for block in blocks if plan[block]), end)
        dense = next((block for block in range(cached, end) if not plan[block]), None)
        if dense is not None:
            return cached, dense
    return None

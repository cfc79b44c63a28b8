"""Plans: for each block, cached or dense. Knows which plans are feasible; knows no tensor."""

from instgenie.activations import Kind
from instgenie.errors import PlanError

Plan = tuple[bool, ...]  # for each block: cached or not
DENSE: Plan = ()  # of a job without activations: no block is cached, however many there are


def is_cached(plan: Plan, block: int) -> bool:
    """After the last block come the velocities: of masked tokens alone if anything was cached."""
    return plan[block] if block < len(plan) else any(plan)


def check_plan(plan: Plan, kind: Kind, num_blocks: int) -> None:
    if len(plan) != num_blocks:
        raise PlanError(f"the plan has {len(plan)} blocks: {num_blocks}, as many as the model, are expected")
    if kind == "kv" and (dense := dense_after_cached(plan)) is not None:
        raise PlanError(
            f"the plan runs block {dense} dense after block {plan.index(True)} was cached: with kv, unmasked tokens "
            "that were dropped cannot come back; a dense prefix, then cached to the end, is expected"
        )


def dense_after_cached(plan: Plan) -> int | None:
    """The first dense block behind a cached one."""
    return next((block for block in range(1, len(plan)) if plan[block - 1] and not plan[block]), None)

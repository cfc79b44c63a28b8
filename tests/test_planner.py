"""Which plans are feasible; no model."""

import itertools

import pytest

from instgenie.errors import PlanError
from instgenie.planner import DENSE, check_plan, is_cached


def test_y_runs_any_plan() -> None:
    for plan in itertools.product((False, True), repeat=5):
        check_plan(plan, "y", (5,))


def test_kv_runs_a_dense_prefix_then_cached_to_the_end() -> None:
    feasible = {(False,) * dense + (True,) * (5 - dense) for dense in range(6)}
    for plan in itertools.product((False, True), repeat=5):
        if plan in feasible:
            check_plan(plan, "kv", (5,))
        else:
            with pytest.raises(PlanError, match="cannot come back"):
                check_plan(plan, "kv", (5,))


def test_refusals_say_what_is_wrong() -> None:
    with pytest.raises(PlanError, match="block 3 dense after block 1"):
        check_plan((False, True, True, False, True), "kv", (5,))
    with pytest.raises(PlanError, match="has 4 blocks: 5"):
        check_plan((True,) * 4, "y", (5,))


def test_after_the_last_block_masked_tokens_alone_matter() -> None:
    assert [is_cached((True, False), block) for block in range(3)] == [True, False, True]
    assert not any(is_cached(plan, block) for plan in (DENSE, (False, False)) for block in range(3))

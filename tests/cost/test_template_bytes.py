"""Bytes of a template, and what a stride and a format make of loads and prices."""

from dataclasses import replace

import pytest

from instgenie.cost.latency import DEFAULTS
from instgenie.cost.network import VALUE_BYTES, BlockShape, NetworkShape, block_flops, load_bytes
from instgenie.cost.pricing import FETCH, JobShape, make_costs

BLOCK = BlockShape(
    per_token=10**6, per_text=10**6, per_rest=10**5, per_pair=4 * 3072, per_branch=0, width=3072, joint=True
)
FLUX = JobShape(NetworkShape((BLOCK,) * 57, (57,), per_token=0, per_branch=0), num_text=512)  # as FLUX.1-dev keeps
NUM_TOKENS, NUM_STEPS = 4096, 28


@pytest.mark.parametrize(
    ("value_bytes", "stride", "gigabytes"),
    [(2, 1, 80.3), (VALUE_BYTES["fp8"], 1, 40.2), (VALUE_BYTES["int4"], 4, 6.3), (VALUE_BYTES["int4"], 7, 3.6)],
)
def test_bytes_of_a_flux_template(value_bytes: float, stride: int, gigabytes: float) -> None:
    costs = make_costs(replace(FLUX, value_bytes=value_bytes, stride=stride), DEFAULTS["cuda"], "cached", NUM_TOKENS)
    num_bytes = costs.template_bytes(NUM_TOKENS, NUM_STEPS)
    assert round(num_bytes / 1e9, 1) == gigabytes
    fixed, per_byte = FETCH["disk"]
    assert costs.fetch_seconds(NUM_TOKENS, NUM_STEPS, "disk") == pytest.approx(fixed + per_byte * num_bytes)


def test_kept_steps_are_counted_up() -> None:
    costs = make_costs(replace(FLUX, stride=7), DEFAULTS["cuda"], "cached", NUM_TOKENS)
    assert costs.template_bytes(NUM_TOKENS, 29) == 5 * costs.template_bytes(NUM_TOKENS, 7)


def test_a_load_that_serves_several_steps_is_shared_among_them() -> None:
    every, seventh = (replace(FLUX, stride=stride) for stride in (1, 7))
    one, other = (load_bytes(BLOCK, shape.demand(NUM_TOKENS, 450, in_gpu=False)) for shape in (every, seventh))
    assert other == pytest.approx(one / 7, rel=1e-6)
    far, near = (make_costs(shape, DEFAULTS["cuda"], "cached", NUM_TOKENS) for shape in (every, seventh))
    assert near.price(NUM_TOKENS, 450, "host").load < far.price(NUM_TOKENS, 450, "host").load
    assert near.gpu == far.gpu


def test_padding_that_is_read_is_loaded_and_not_computed() -> None:
    reading = replace(FLUX, num_prompt=32)
    computed, read = (shape.demand(NUM_TOKENS, 450, in_gpu=False) for shape in (FLUX, reading))
    saved = block_flops(BLOCK, computed, cached=True) - block_flops(BLOCK, read, cached=True)
    assert saved == 480 * (BLOCK.per_text + BLOCK.per_pair * (NUM_TOKENS + 512))  # its keys stay
    assert block_flops(BLOCK, computed, cached=False) == block_flops(BLOCK, read, cached=False)
    per_row = 2 * BLOCK.width * FLUX.value_bytes
    assert load_bytes(BLOCK, read) - load_bytes(BLOCK, computed) == 480 * per_row
    whole, with_text = (make_costs(shape, DEFAULTS["cuda"], "cached", NUM_TOKENS) for shape in (FLUX, reading))
    added = with_text.template_bytes(NUM_TOKENS, NUM_STEPS) - whole.template_bytes(NUM_TOKENS, NUM_STEPS)
    assert added == NUM_STEPS * 512 * 57 * per_row
    assert with_text.price(NUM_TOKENS, 450, "gpu").compute < whole.price(NUM_TOKENS, 450, "gpu").compute
    assert with_text.dense == whole.dense

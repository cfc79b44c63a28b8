"""Prices and plans of convolutions that compute masked tiles alone."""

from dataclasses import replace

import pytest
from helpers.edits import make_edit

from instgenie.cost.latency import DEFAULTS, Latency
from instgenie.cost.network import (
    BlockShape,
    ConvolutionShape,
    Demand,
    NetworkShape,
    active_share,
    convolution_bytes,
    outside_flops,
    step_flops,
)
from instgenie.cost.planner import plan_batch
from instgenie.cost.pricing import JobShape, make_costs, step_bytes
from instgenie.engine.demand import make_demand
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel

NUM_TOKENS = 64 * 64
BLOCK = BlockShape(per_token=10**6, per_text=0, per_rest=0, per_pair=1000, per_branch=0, width=512, output_width=512)
CONVOLUTIONS = (ConvolutionShape(64, 1, 8, "tiles"), ConvolutionShape(320, 1, 8, "border"))
NETWORK = NetworkShape((BLOCK,) * 4, (4,), per_token=10**7, per_branch=0, convolutions=CONVOLUTIONS)
SHAPE = JobShape(NETWORK, num_text=77)
PLAIN = replace(SHAPE, network=replace(NETWORK, convolutions=()))


def test_masked_tiles_cost_less_where_every_block_is_cached() -> None:
    demand = SHAPE.demand(NUM_TOKENS, NUM_TOKENS // 16, in_gpu=True)
    assert demand.active == pytest.approx(((16 + 8) / 64) ** 2)
    dense = NETWORK.per_token * NUM_TOKENS
    assert outside_flops(NETWORK, demand, (True,) * 4) == round(demand.active * dense)
    assert outside_flops(NETWORK, demand, (False, True, True, True)) == dense
    assert outside_flops(NETWORK, SHAPE.dense_demand(NUM_TOKENS)) == dense
    assert active_share(NETWORK, NUM_TOKENS, 0) == 0
    assert active_share(NETWORK, NUM_TOKENS, NUM_TOKENS) == 1
    assert active_share(PLAIN.network, NUM_TOKENS, 100) is None
    padded = replace(NETWORK, pads_lists=True)
    assert active_share(padded, NUM_TOKENS, NUM_TOKENS // 16) == 5 / 32


def test_prices_know_masked_tiles() -> None:
    latency = DEFAULTS["cuda"]
    tiled, plain = (make_costs(shape, latency, "cached", NUM_TOKENS) for shape in (SHAPE, PLAIN))
    few = NUM_TOKENS // 16
    assert tiled.price(NUM_TOKENS, few, "gpu").compute < plain.price(NUM_TOKENS, few, "gpu").compute
    assert tiled.price(NUM_TOKENS, few, "host").load > plain.price(NUM_TOKENS, few, "host").load
    assert tiled.price(NUM_TOKENS, NUM_TOKENS, "gpu").compute == plain.price(NUM_TOKENS, NUM_TOKENS, "gpu").compute
    assert tiled.dense == plain.dense


def test_convolutions_are_dense_where_loading_takes_longer() -> None:
    demand = SHAPE.demand(NUM_TOKENS, NUM_TOKENS // 16, in_gpu=False)
    quick = Latency("any", "any", block=0, flop=1e-12, flop_outside=1e-12, load=0, byte=1e-15)
    assert all(plan_batch(NETWORK, [demand], quick).plan)
    slow = replace(quick, byte=1e-6)
    planned = plan_batch(NETWORK, [demand], slow)
    assert not any(planned.plan)
    step = planned.seconds + slow.outside(NETWORK, [demand], planned.plan)
    assert step == pytest.approx(slow.predict_step(NETWORK, [demand], planned.plan))
    assert step < slow.predict_step(NETWORK, [demand], (True,) * 4)
    assert all(plan_batch(NETWORK, [demand], slow, policy="cached").plan)


def test_jobs_ask_for_their_tiles_and_templates_have_their_bytes(models: dict[str, Model]) -> None:
    plain = models["sdxl"]
    assert isinstance(plain, UnetModel)
    model = plain.with_convolutions("reused")
    edit = make_edit(size=(64, 64), share=0.05, steps=1)
    kept = register(edit.picture, model, edit.size, 1, edit.guidance)
    job, network = reuse(prepare(edit, model), kept), model.describe()
    demand = make_demand(job, network)
    assert demand.active == 1 / 4  # one of four tiles of 8 by 8 at the finest level, and of 4 by 4 at the next
    whole = replace(demand, num_masked=dict.fromkeys(demand.num_masked, 0))
    assert step_bytes(network, whole) == kept.num_bytes
    assert convolution_bytes(network, whole) == sum(rows.nbytes for rows in kept.rows[kept.num_places :])
    everything, nothing = (True,) * sum(model.run_lengths), (False,) * sum(model.run_lengths)
    without = make_demand(replace(job, activations=None, plan=()), network)
    assert isinstance(without, Demand)
    assert without.active is None
    assert step_flops(network, [demand], everything) < step_flops(plain.describe(), [demand], nothing)

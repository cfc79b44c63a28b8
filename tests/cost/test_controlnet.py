"""What a ControlNet adds to a step: its FLOPs against those that torch counts, and its seconds by where it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from instgenie.cost.controlnet import controlnet_seconds, controlnet_shape
from instgenie.cost.latency import Latency
from instgenie.cost.learning import NUM_FIRST, LearntCosts
from instgenie.cost.network import Demand, step_flops
from instgenie.cost.table import ControlPrice, Guided, Price, StepCosts

if TYPE_CHECKING:
    from instgenie.models.model import Model

CHEAP, DEAR = Price(0.01, 0.0), Price(0.1, 0.0, 1.0)
CONTROLS = {
    "here": ControlPrice(0.04),
    "there": ControlPrice(0.06, "cuda:1", 0.4),
    "beside": ControlPrice(0.03, "cuda:1", 0.4),
    "elsewhere": ControlPrice(0.05, "cuda:2", 0.4),
}


def table(**controls: ControlPrice) -> StepCosts:
    return StepCosts(100, 0.01, (0.0, 1.0), (CHEAP, DEAR), (CHEAP, DEAR), DEAR, controls=controls or CONTROLS)


@pytest.mark.parametrize("name", ["sd", "sdxl", "blend"])
def test_flops_are_those_that_torch_counts(name: str, models: "dict[str, Model]", tmp_path: Path) -> None:
    import torch
    from helpers.controlnets import controlled, save_controlnet
    from helpers.edits import make_edit
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from instgenie.engine.controls import ControlShelf, open_job, step_of
    from instgenie.engine.prepare import prepare
    from instgenie.models.controlnet import compute

    model = models[name]
    folder = save_controlnet(tmp_path / "net", model)
    job = prepare(controlled(make_edit(true_guidance=2.0), (folder, {})), model)
    net = ControlShelf(model.device, model.dtype).take(job.controls[0].use)
    asked = [(open_job(job, [net]), step_of(job, model))]
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        compute(asked)
    network = controlnet_shape(json.loads((folder / "config.json").read_text()))
    num_tokens, num_text = len(job.masked), len(asked[0][0].texts[0])
    everything = {side: num_tokens // side**2 for side in network.sides}
    demand = Demand(num_tokens, everything, num_text, len(job.branches))
    predicted = step_flops(network, [demand], [False] * len(network.blocks))
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.02)
    latency = Latency("cpu", name, block=0.5, flop=0.0, flop_outside=0.0, load=0.0, byte=0.0)
    assert controlnet_seconds(network, latency, num_tokens, num_text, 2) == 0.5 * len(network.blocks)


def test_on_the_device_of_the_steps_they_add_up() -> None:
    costs = table()
    assert costs.control_seconds(CHEAP, 100, [Guided("here")]) == pytest.approx(0.04)
    assert costs.control_seconds(CHEAP, 50, [Guided("here"), Guided("here", 0.5)]) == pytest.approx(0.03)
    assert costs.guided(DEAR, 100, [Guided("here")]) == Price(0.1 + 0.04, 0.0, 1.0)
    assert costs.guided(DEAR, 100, []) == costs.guided(DEAR, 100, [Guided("unknown")]) == DEAR


def test_on_another_device_a_part_of_the_computing_hides_them() -> None:
    costs = table()
    assert costs.control_seconds(DEAR, 100, [Guided("there")]) == pytest.approx(0.06 - 0.4 * 0.1)
    assert costs.control_seconds(DEAR, 100, [Guided("beside")]) == 0.0
    assert costs.control_seconds(CHEAP, 100, [Guided("there")]) == pytest.approx(0.06 - 0.4 * 0.01)
    one_device = costs.control_seconds(CHEAP, 100, [Guided("there"), Guided("beside")])
    two_devices = costs.control_seconds(CHEAP, 100, [Guided("there"), Guided("elsewhere")])
    assert one_device == pytest.approx(0.09 - 0.004)
    assert two_devices == pytest.approx(0.06 - 0.004)


def test_measured_steps_correct_them_too() -> None:
    costs = table()
    learnt = LearntCosts(costs)
    for _ in range(8 * NUM_FIRST):
        for price in (costs.guided(CHEAP, 100, [Guided("here")]), DEAR, CHEAP):
            learnt.measure([price], 0.02 + 3 * price.compute)
    corrected = learnt.costs
    for price in (corrected.gpu[0], corrected.gpu[1]):
        guided = corrected.step_seconds([corrected.guided(price, 100, [Guided("here")])])
        plain = corrected.step_seconds([price])
        assert corrected.ratio * (guided - plain) == pytest.approx(3 * 0.04, rel=0.1)

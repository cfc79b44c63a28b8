"""What the ControlNets that edits may name add to the steps of a worker, wherever they run."""

from pathlib import Path

from msgspec.structs import replace

from instgenie.adapters.controlnets import FLUX_KIND, RegisteredControlNet, open_controlnet
from instgenie.cluster.config import ProcessConfig
from instgenie.cost.controlnet import controlnet_seconds, controlnet_shape
from instgenie.cost.latency import Latency, calibrated_name, find_latency
from instgenie.cost.table import ControlPrice, StepCosts
from instgenie.engine.controls import control_shape
from instgenie.engine.pricing import job_shape
from instgenie.machine.device import cpu_name, device_name
from instgenie.models.model import Model


def with_controls(costs: StepCosts, config: ProcessConfig, model: Model) -> StepCosts:
    """The costs with those of the ControlNets that fit the model."""
    found = {}
    for number, (name, path) in enumerate(config.controls.modules):
        net = open_controlnet(name, Path(path))
        if net.fits(control_shape(model)):  # else edits that name it are refused
            found[net.version] = price_control(net, costs, config, model, place_of(config, number))
    return replace(costs, controls=found)


def price_control(
    net: RegisteredControlNet, costs: StepCosts, config: ProcessConfig, model: Model, place: str
) -> ControlPrice:
    """The price of a ControlNet on another device; one without a name is that of the steps."""
    network, usual = controlnet_shape(net.config), job_shape(model, model.dtype.itemsize)
    demand = costs.num_tokens, usual.num_text, usual.num_branches
    name = calibrated_name(config.model, config.quantization or config.weights_dtype)
    own = controlnet_seconds(network, find_latency(device_name(model.device), name, model.device.type), *demand)
    if not place:
        return ControlPrice(own)
    # a ControlNet of a UNet is a copy of its encoder, beside which it runs; one of Flux is needed at once
    dense = costs.per_step + costs.dense.compute
    hidden = 0.0 if net.kind == FLUX_KIND or not dense else min(own / dense, 1.0)
    return ControlPrice(controlnet_seconds(network, latency_at(place, name, model), *demand), place, hidden)


def latency_at(place: str, name: str, model: Model) -> Latency:
    """The latency of another device, which this process may not see: GPUs are taken to be alike."""
    kind = "cpu" if place == "cpu" else "cuda"
    if kind == model.device.type:
        return find_latency(device_name(model.device), name, kind)
    return find_latency(cpu_name() if kind == "cpu" else kind, name, kind)


def place_of(config: ProcessConfig, number: int) -> str:
    """The device on which a ControlNet runs, if it is another one than that of the steps."""
    return config.control_places[number % len(config.control_places)] if config.control_places else ""

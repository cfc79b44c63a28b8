"""Dummies: fills the parts of a recipe with random weights, on the device where they will run."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from instgenie.errors import ModelError
from instgenie.kernels.quantize import quantize_rows_reference
from instgenie.models.families import DUMMIES
from instgenie.models.family import Family
from instgenie.models.layers.fp8_linear import Fp8Weights
from instgenie.models.loading.skeleton import Rooms
from instgenie.models.recipe import Recipe

PREFIX = "dummy:"


def find_dummy(name: str) -> tuple[Family, Recipe]:
    short = name.removeprefix(PREFIX)
    if short not in DUMMIES:
        known = ", ".join(PREFIX + known for known in DUMMIES)
        raise ModelError(f"unknown model {name!r}: {known} are the models with random weights")
    family = DUMMIES[short]
    return family, family.dummies[short]


def count_dummy(
    recipe: Recipe,
    family: Family,
    hollow: Collection[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    quantize: Callable[[nn.Module], None] | None = None,
) -> int:
    """Count the bytes of network and autoencoder that are filled, without making any."""
    modules = {
        part: on_meta(make).to(dtype) for part, make in large_parts(recipe, family).items() if part not in hollow
    }
    if quantize and family.network_name in modules:
        quantize(modules[family.network_name])
    return sum(value.nbytes for module in modules.values() for value in module.state_dict().values())


def make_parts(
    recipe: Recipe,
    family: Family,
    device: torch.device,
    dtype: torch.dtype,
    hollow: Collection[str] = (),
    quantize: Callable[[nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Construct and fill all parts. A hollow part gets no weights; a hollow network has those of its prompt layers.
    `quantize` exchanges and joins layers of the network, which is not yet filled."""
    filled = {}
    for part, make in large_parts(recipe, family).items():
        module = filled[part] = on_meta(make).to(dtype)
        if quantize and part == family.network_name and part not in hollow:
            quantize(module)
        if part not in hollow:
            fill_randomly(module._apply(Rooms(device).make))
        elif part == family.network_name:
            fill_prompt_layers(module, family, device)
    others = recipe.others()
    encoders = {part: other.to(device, dtype) for part, other in others.items() if isinstance(other, nn.Module)}
    for part in encoders.keys() & set(hollow):
        encoders[part].to("meta")
    for module in (encoders | filled).values():
        module.eval().requires_grad_(False)
    return others | encoders | filled


def large_parts(recipe: Recipe, family: Family) -> dict[str, Callable[[], nn.Module]]:
    """The parts of published size."""
    return {family.network_name: recipe.network, "vae": recipe.vae}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@torch.no_grad()
def fill_randomly(module: nn.Module) -> nn.Module:
    """Draw weights such that activations keep their scale from layer to layer."""
    low = [layer for layer in module.modules() if isinstance(layer, Fp8Weights)]
    quantized = {id(one) for layer in low for one in (layer.weight, layer.scale)}
    for layer in low:
        drawn = torch.empty(layer.weight.shape, dtype=layer.dtype, device=layer.weight.device)
        kept = quantize_rows_reference(drawn.normal_(std=layer.in_features**-0.5))
        layer.weight.copy_(kept.values.view(layer.kept_as))
        layer.scale.copy_(kept.scale[:, 0])
    for name, parameter in module.named_parameters():
        if id(parameter) not in quantized:
            fill_parameter(name, parameter)
    for name, buffer in module.named_buffers():  # tables that a checkpoint holds, such as positions
        if name.endswith("running_var"):
            buffer.fill_(1)
        else:
            buffer.normal_() if buffer.is_floating_point() else buffer.zero_()
    return module


@torch.no_grad()
def fill_prompt_layers(network: nn.Module, family: Family, device: torch.device) -> None:
    """Draw the weights of a hollow network that prompts pass."""
    names = [name for name, _ in network.named_parameters() if family.is_of_prompts(name)]
    for name in names:
        parent, _, own = name.rpartition(".")
        parameter = nn.Parameter(torch.empty_like(network.get_parameter(name), device=device))
        fill_parameter(name, parameter)
        setattr(network.get_submodule(parent), own, parameter)


def fill_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.ndim > 1:
        parameter.normal_(std=parameter[0].numel() ** -0.5)
    else:
        parameter.fill_(0 if name.endswith("bias") else 1)

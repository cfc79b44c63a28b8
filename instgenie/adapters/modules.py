"""Layers of torch modules as LoRAs see them."""

from collections.abc import Mapping

from torch import nn

from instgenie.adapters.fitting import name_layers
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.layers import Alias, LayerShape, LayerTable


def describe_layers(parts: Mapping[str, nn.Module], foreign: Mapping[str, Alias]) -> LayerTable:
    """Describe the layers of a pipeline's parts; `foreign` names are those of the part that denoises."""
    shapes = {part: find_shapes(module) for part, module in parts.items()}
    aliases = {part: name_layers(names, foreign if part == NETWORK else {}) for part, names in shapes.items()}
    return LayerTable(shapes, aliases)


def find_shapes(module: nn.Module) -> dict[str, LayerShape]:
    shapes = ((name, shape_of(layer)) for name, layer in module.named_modules())
    return {name: shape for name, shape in shapes if shape}


def sees_pictures(layer: nn.Module) -> bool:
    """True if a convolution sees more than one pixel: its products are not those of rows."""
    return isinstance(layer, nn.Conv2d) and (layer.kernel_size != (1, 1) or layer.stride != (1, 1))


def shape_of(layer: nn.Module) -> LayerShape | None:
    """The shape of a layer that a LoRA may patch; layers of low precision have the same attributes as linear ones."""
    if isinstance(layer, nn.Conv2d):
        height, width = layer.kernel_size
        return LayerShape(layer.in_channels, layer.out_channels, (height, width)) if layer.groups == 1 else None
    inputs, outputs = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return LayerShape(inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None

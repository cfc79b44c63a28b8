"""Linear layers whose weights are in e4m3 with a scale per output channel, in place of a network's own: layers that
multiply in e4m3, and layers whose weights become plain numbers again for each product."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.kernels.fp8 import E4M3
from instgenie.kernels.quantize import MULTIPLE, Rows, quantize_rows, scaled_product

MIN_VALUES = 2**20  # of a weight that is worth its launches to make it plain numbers again


class Fp8Weights(nn.Module):
    """Multiplies plain rows. Its weights take a byte each, and as plain numbers only while they are multiplied."""

    kept_as: torch.dtype = torch.int8  # the bits; libraries take a weight's floating dtype for that of the rows

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype  # of the product
        kept = quantize_rows(layer.weight.detach())
        self.weight = nn.Parameter(kept.values.view(self.kept_as), requires_grad=False)  # [outputs, inputs]
        self.scale = nn.Parameter(kept.scale[:, 0].contiguous(), requires_grad=False)  # [outputs]
        self.bias = layer.bias

    def forward(self, rows: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        return F.linear(rows, self.plain_weight(), self.bias)

    def plain_weight(self) -> Tensor:
        return self.weight.view(E4M3).to(self.dtype).mul_(self.scale[:, None])


class Fp8Linear(Fp8Weights):
    """Multiplies rows in e4m3; rows that are not yet are quantised in a launch of their own."""

    kept_as = E4M3

    def forward(self, rows: Rows) -> Tensor:  # [rows, inputs] -> [rows, outputs]
        return multiply_fp8(rows, self.weight, self.scale, self.bias, self.dtype)


def multiply_fp8(rows: Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    quantized = quantize_rows(rows) if isinstance(rows, Tensor) else rows
    return scaled_product(quantized, weight, scale, bias, dtype)


def reads_fp8(layer: nn.Module) -> bool:
    """True if the layer's input may come as `Fp8Rows`."""
    return isinstance(layer, Fp8Linear)


def quantizable(network: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers with such names, as far as their channels suit products in fp8."""
    for name, layer in network.named_modules():
        is_named = any(re.fullmatch(pattern, name) for pattern in patterns)
        if is_named and type(layer) is nn.Linear and suits(layer):
            yield name, layer


def suits(layer: nn.Linear) -> bool:
    return not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)


def quantize_layers(network: nn.Module, patterns: Sequence[str], device: torch.device) -> None:
    """Put weights in e4m3, on the device, in place of those of the layers with such names."""
    exchange_layers(network, {name: Fp8Linear for name, _ in quantizable(network, patterns)}, device)


def large_layers(module: nn.Module) -> Iterator[str]:
    """Names of the linear layers whose weights are large, suit rows in e4m3, and belong to no other layer as well."""
    num_uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    for name, layer in module.named_modules():
        is_own = type(layer) is nn.Linear and num_uses[id(layer.weight)] == 1
        if is_own and suits(layer) and layer.weight.numel() >= MIN_VALUES:
            yield name


def exchange_layers(network: nn.Module, kinds: Mapping[str, type[Fp8Weights]], device: torch.device) -> None:
    """Put layers of these kinds in place of linear ones, by name. Layers move to the device one by one, so that it
    never has the whole weights of all."""
    for name, make in kinds.items():
        parent, _, own = name.rpartition(".")
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(network.get_submodule(parent), own, make(layer.to(device)))

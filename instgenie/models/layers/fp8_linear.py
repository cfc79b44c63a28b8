"""A linear layer of low precision: weights in e4m3 with a scale per output channel, in place of the layer's own."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from instgenie.kernels.quantize import MULTIPLE, Rows, quantize_rows, scaled_product


class Fp8Linear(nn.Module):
    """Multiplies rows in e4m3; rows that are not yet are quantised in a launch of their own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype  # of the product
        kept = quantize_rows(layer.weight.detach())
        self.weight = nn.Parameter(kept.values, requires_grad=False)  # [outputs, inputs]
        self.scale = nn.Parameter(kept.scale[:, 0].contiguous(), requires_grad=False)  # [outputs]
        self.bias = layer.bias

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
        if (
            is_named
            and type(layer) is nn.Linear
            and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
        ):
            yield name, layer


def quantize_layers(network: nn.Module, patterns: Sequence[str], device: torch.device) -> None:
    """Put weights in e4m3, on the device, in place of those of the layers with such names. Layers move one by one, so
    that the device never has the whole weights of all."""
    for name, layer in list(quantizable(network, patterns)):
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, Fp8Linear(layer.to(device)))

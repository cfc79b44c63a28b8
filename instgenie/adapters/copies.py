"""Weights with the LoRAs of one edit merged into them, as copies beside the model's own, which stay as they are.

The copies of all layers lie in one block of memory. Layers that a pass multiplies at once, because their weights lie
one behind the other, are copied together and lie so in the copy, too.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from instgenie.adapters.modules import sees_pictures
from instgenie.kernels.low_rank import LowRankLayers, to_device
from instgenie.kernels.merge_weights import merge_weights

ALIGNMENT = 128  # bytes between the starts of copies, as kernels prefer it

Joined = tuple[nn.Module, ...]  # layers whose weights lie one behind the other, or a single one


def find_joined(layers: Sequence[nn.Module]) -> dict[nn.Module, Joined]:
    """Per layer whose weight can be copied, the layers whose weights fill the same memory, itself among them. Layers of
    low precision and convolutions that see more than a pixel cannot."""
    in_memory: dict[int, list[nn.Module]] = {}
    for layer in layers:
        if type(layer) in (nn.Linear, nn.Conv2d) and not sees_pictures(layer) and weight_of(layer).is_contiguous():
            in_memory.setdefault(weight_of(layer).untyped_storage().data_ptr(), []).append(layer)
    found: dict[nn.Module, Joined] = {}
    for together in in_memory.values():
        together.sort(key=lambda layer: weight_of(layer).storage_offset())
        num_bytes = sum(weight_of(layer).nbytes for layer in together)
        is_filled = num_bytes == weight_of(together[0]).untyped_storage().nbytes()
        found |= {layer: tuple(together) if is_filled else (layer,) for layer in together}
    return found


def padded_bytes(group: Joined) -> int:
    num_bytes = sum(weight_of(layer).nbytes for layer in group)
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def weight_of(layer: nn.Module) -> Tensor:
    return layer.get_parameter("weight").detach()


class WeightCopies:
    """The copies for one set of LoRAs with their scales. Knows none of their tensors once it is made."""

    @torch.no_grad()
    def __init__(
        self,
        groups: Sequence[Joined],
        products: LowRankLayers,
        numbers: Mapping[nn.Module, int],
    ) -> None:
        self.token = object()  # tells it from all others in keys of caches
        self.num_layers = len(numbers)
        self.groups: dict[int, int] = {}  # by number of the layer, that of the first one that it is joined to
        self.weights: dict[int, Tensor] = {}  # by number of the layer
        device = weight_of(next(iter(numbers))).device
        self.memory = torch.empty(sum(map(padded_bytes, groups)), dtype=torch.uint8, device=device)
        weights = {numbers[layer]: weight_of(layer).flatten(1) for group in groups for layer in group}
        start = 0
        for group in groups:
            end = start
            for number in (numbers[layer] for layer in group):
                weight, first = weights[number], end
                end += weight.nbytes
                self.weights[number] = self.memory[first:end].view(weight.dtype).view(weight.shape)
                self.groups[number] = numbers[group[0]]
            start += padded_bytes(group)
        merge_weights(list(weights.values()), list(self.weights.values()), products, list(weights))

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @cached_property
    def table(self) -> Tensor:
        """[layers], int64: the addresses of the copies, on the device; 0 for a layer without one."""
        table = np.zeros(self.num_layers, dtype=np.int64)
        for number, weight in self.weights.items():
            table[number] = weight.data_ptr()
        return to_device(table, self.memory.device)

"""Weights with the LoRAs of one edit merged into them, as copies beside the model's own, which stay as they are.

The copies of all layers lie in one block of memory. Layers that a pass multiplies at once, because their weights lie
one behind the other, are copied together and lie so in the copy, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from instgenie.adapters.modules import sees_pictures
from instgenie.kernels.low_rank import LowRankLayers, to_device
from instgenie.kernels.merge_weights import merge_weights

ALIGNMENT = 128  # bytes between the starts of copies, as kernels prefer it

Joined = tuple[nn.Module, ...]  # layers whose weights lie one behind the other, or a single one


def find_joined(layers: Collection[nn.Module]) -> dict[nn.Module, Joined]:
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


def weight_of(layer: nn.Module) -> Tensor:
    return layer.get_parameter("weight").detach()


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What is copied for LoRAs that patch certain layers, and where it lies in the block of memory."""

    weights: list[Tensor]  # [outputs, inputs], of the model
    numbers: list[int]  # of their layers
    places: list[int]  # in bytes
    groups: frozenset[tuple[int, int]]  # numbers of the layers, each with that of the first one that it is joined to
    num_bytes: int


def plan_copies(
    patched: Collection[nn.Module], joined: Mapping[nn.Module, Joined], numbers: Mapping[nn.Module, int]
) -> CopyPlan:
    groups = dict.fromkeys(joined[layer] for layer in patched if layer in joined)
    layers = [layer for group in groups for layer in group]
    weights = [weight_of(layer).flatten(1) for layer in layers]
    places, end = [], 0
    for group in groups:
        for layer in group:
            places.append(end)
            end += weight_of(layer).nbytes
        end += -end % ALIGNMENT
    pairs = frozenset((numbers[layer], numbers[group[0]]) for group in groups for layer in group)
    return CopyPlan(weights, [numbers[layer] for layer in layers], places, pairs, end)


class WeightCopies:
    """The copies for one set of LoRAs with their scales. Knows none of their tensors once it is made."""

    @torch.no_grad()
    def __init__(self, plan: CopyPlan, products: LowRankLayers) -> None:
        self.plan = plan
        self.num_layers = len(products.layers)
        self.token = object()  # tells it from all others in keys of caches
        device = next(low.down.device for own in products.layers for low in own)
        self.memory = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
        merge_weights(plan.weights, self.memory, plan.places, products, plan.numbers)

    @cached_property
    def table(self) -> Tensor:
        """[layers], int64: the addresses of the copies, on the device; 0 for a layer without one."""
        table = np.zeros(self.num_layers, dtype=np.int64)
        table[self.plan.numbers] = np.array(self.plan.places, dtype=np.int64) + self.memory.data_ptr()
        return to_device(table, self.memory.device)

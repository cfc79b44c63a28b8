"""LoRAs as a pass applies them: low-rank products, added to the rows of the branches that use them.

    y = W x + scale * up (down x)

Edits with different LoRAs, with several and with none share a pass: the product with W is one for all rows, the small
products are made for the rows of each edit alone. A pass without LoRAs has no object of this kind.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.adapters.lora import Lora, LowRank


@dataclass(eq=False)
class MergeState:
    is_merged: bool = False  # True while the weights contain the LoRAs, so that no product is added


@dataclass(frozen=True, eq=False)
class AppliedLoras:
    """The LoRAs of one edit, each with its scale, at the modules they patch. Edits with the same LoRAs and scales may
    share one object."""

    layers: Mapping[nn.Module, tuple[LowRank, ...]]
    names: tuple[tuple[str, float], ...] = ()  # version and scale of each
    token: object = field(default_factory=object)  # tells it from all others in keys of caches, and holds no tensors
    merging: MergeState = field(default_factory=MergeState)

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """The layers of a module that are patched."""
        return [layer for layer in module.modules() if layer in self.layers]


def apply_loras(
    parts: Mapping[str, nn.Module], loras: Sequence[tuple[Lora, float]], names: tuple[tuple[str, float], ...] = ()
) -> AppliedLoras:
    """Bind LoRAs, each with the scale that an edit asks for, to the modules of some parts of a pipeline. Layers of
    other parts are left out."""
    layers: dict[nn.Module, tuple[LowRank, ...]] = {}
    for lora, scale in loras:
        for (part, name), low in lora.layers.items():
            if part in parts and scale:
                module = parts[part].get_submodule(name)
                layers[module] = (*layers.get(module, ()), LowRank(low.down, low.up, low.scale * scale))
    return AppliedLoras(layers, names)


@dataclass(frozen=True, eq=False)
class LoraGroup:
    """Consecutive branches that use the same LoRAs."""

    first: int
    end: int
    applied: AppliedLoras


@dataclass(frozen=True, eq=False)
class BatchLoras:
    """The LoRAs of a packed batch."""

    groups: tuple[LoraGroup, ...]

    def patches(self, layer: nn.Module) -> bool:
        return any(layer in group.applied.layers for group in self.groups)

    def patches_inside(self, module: nn.Module) -> list[nn.Module]:
        """The layers of a module that any branch patches."""
        return list(dict.fromkeys(layer for group in self.groups for layer in group.applied.inside(module)))

    def of_branch(self, branch: int) -> "BatchLoras | None":
        """Those of one branch, as a batch of its own."""
        found = [group for group in self.groups if group.first <= branch < group.end]
        return BatchLoras((LoraGroup(0, 1, found[0].applied),)) if found else None

    def add(self, layer: nn.Module, rows: Tensor, out: Tensor, bounds: Sequence[int]) -> None:
        """Add to the output [rows, outputs] of a linear layer, in place. Rows of branch `b` are those from `bounds[b]`
        up to `bounds[b + 1]`."""
        for group in self.groups:
            for low in group.applied.layers.get(layer, ()):
                own = slice(bounds[group.first], bounds[group.end])
                add_product(low, rows[own], out[own])

    def add_convolved(self, layer: nn.Conv2d, pictures: Tensor, out: Tensor) -> None:
        """Add to the output [branches, channels, rows, columns] of a convolution, in place."""
        for group in self.groups:
            for low in group.applied.layers.get(layer, ()):
                own = slice(group.first, group.end)
                add_convolution(layer, low, pictures[own], out[own])


def batch_loras(branches: Sequence[AppliedLoras | None]) -> BatchLoras | None:
    """The LoRAs of a batch, from those of each branch; None if there are none."""
    groups: list[LoraGroup] = []
    for branch, applied in enumerate(branches):
        if applied is None or applied.merging.is_merged:
            continue
        last = groups[-1] if groups else None
        if last and last.end == branch and last.applied is applied:
            groups[-1] = LoraGroup(last.first, branch + 1, applied)
        else:
            groups.append(LoraGroup(branch, branch + 1, applied))
    return BatchLoras(tuple(groups)) if groups else None


def add_product(low: LowRank, rows: Tensor, out: Tensor) -> None:  # [rows, inputs], [rows, outputs]
    hidden = F.linear(rows, low.down.flatten(1))  # also of a convolution whose patches are rows
    out.addmm_(hidden, low.up.T, alpha=low.scale)


def add_convolution(layer: nn.Conv2d, low: LowRank, pictures: Tensor, out: Tensor) -> None:
    down = low.down if low.down.ndim == 4 else low.down[:, :, None, None]
    hidden = F.conv2d(pictures, down, None, layer.stride, layer.padding, layer.dilation)
    out.add_(F.conv2d(hidden, low.up[:, :, None, None]), alpha=low.scale)


@contextmanager
def hooked(module: nn.Module, loras: BatchLoras, bounds: Sequence[int] | None) -> Iterator[None]:
    """While inside, the layers of a module that is called as a whole add what LoRAs patch. `bounds` separate the rows
    of the branches; None: all rows belong to the first branch."""

    def add(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            loras.add_convolved(layer, args[0], out)
            return
        rows, flat = args[0].flatten(0, -2), out.view(-1, out.shape[-1])
        loras.add(layer, rows, flat, bounds or (0, len(rows)))

    with ExitStack() as hooks:
        for layer in loras.patches_inside(module):
            hooks.enter_context(layer.register_forward_hook(add))  # leaving it removes the hook
        yield

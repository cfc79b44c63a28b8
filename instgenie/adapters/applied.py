"""LoRAs as a pass applies them: low-rank products, added to the rows of the branches that use them.

    y = W x + scale * up (down x)

Edits with different LoRAs, with several and with none share a pass: the product with W is one for all rows, the small
products are made for the rows of each edit alone, in one launch. Where all sets of LoRAs of a pass have copies of the
weights (`copies.py`), rows are multiplied by those of their edit instead. A pass without LoRAs has no object of this
kind.

Each branch has a slot, which says where its products are. A captured pass is bound to the slots, to the layers that any
LoRA patches and to the class of their ranks, and not to the LoRAs: others may be in the slots when it is repeated.
"""

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.adapters.copies import WeightCopies
from instgenie.adapters.lora import Lora
from instgenie.adapters.modules import sees_pictures, shape_of
from instgenie.kernels.low_rank import (
    LowRank,
    LowRankLayers,
    LowRankRows,
    RankClass,
    add_low_rank,
    make_slots,
    to_device,
)
from instgenie.kernels.roles import Column, LeftOut, Static

MAX_BATCHES = 16  # whose slots are kept


@dataclass(eq=False)
class MergeState:
    is_merged: bool = False  # True while the weights contain the LoRAs, so that no product is added
    kept: weakref.ref[WeightCopies] | None = None  # copies of the weights that contain them, as long as they are kept

    @property
    def copies(self) -> WeightCopies | None:
        return self.kept() if self.kept else None


@dataclass(frozen=True, eq=False)
class AppliedLoras:
    """The LoRAs of one edit, each with its scale, at the modules they patch. Edits with the same LoRAs and scales may
    share one object."""

    layers: Mapping[nn.Module, tuple[LowRank, ...]]
    numbers: Mapping[nn.Module, int]  # of all layers that LoRAs may patch, the same for all edits
    names: tuple[tuple[str, float], ...] = ()  # version and scale of each
    token: object = field(default_factory=object)  # tells it from all others in keys of caches, and holds no tensors
    merging: MergeState = field(default_factory=MergeState)
    batches: "dict[Hashable, LoraSlots]" = field(default_factory=dict)  # by the tokens of those that share a batch

    @cached_property
    def low_rank(self) -> LowRankLayers:
        """By number of the layer."""
        return LowRankLayers([self.layers.get(layer, ()) for layer in self.numbers])

    @cached_property
    def patches_pictures(self) -> bool:
        """True if a convolution is patched that sees more than one pixel: its products are not those of rows."""
        return any(sees_pictures(layer) for layer in self.layers)


class PatchableLayers:
    """The layers of some parts of a pipeline that LoRAs may patch, found once. The same parts give the same numbers."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        found = ((part, *named) for part, module in parts.items() for named in module.named_modules())
        self.by_name = {(part, name): layer for part, name, layer in found if shape_of(layer)}
        self.numbers = {layer: number for number, layer in enumerate(dict.fromkeys(self.by_name.values()))}


def apply_loras(
    patchable: PatchableLayers, loras: Sequence[tuple[Lora, float]], names: tuple[tuple[str, float], ...] = ()
) -> AppliedLoras:
    """Bind LoRAs, each with the scale that an edit asks for, to layers. Layers of other parts are left out."""
    layers: dict[nn.Module, tuple[LowRank, ...]] = {}
    for lora, scale in loras:
        for name, low in lora.layers.items() if scale else ():
            if layer := patchable.by_name.get(name):
                layers[layer] = (*layers.get(layer, ()), low.scaled(scale))
    return AppliedLoras(layers, patchable.numbers, names)


@dataclass(frozen=True, eq=False)
class LoraSlots:
    """Where the branches of a batch find their products."""

    table: Column[Tensor]  # [branches, 2], see `LowRankRows.slots`
    patched: Static[frozenset[int]]  # numbers of the layers that any branch patches
    rank_class: Static[RankClass]
    copies: Column[Tensor | None] = None  # [branches], see `LowRankRows.copies`; None: products are added to all layers
    copied: Static[frozenset[tuple[int, int]]] = frozenset()  # layers that any branch has copies of, see `joined`

    @cached_property
    def joined(self) -> dict[int, int]:
        """By number of a copied layer, that of the first layer that it is joined to."""
        return dict(self.copied)

    def of_branch(self, branch: int) -> "LoraSlots":
        own = slice(branch, branch + 1)
        return replace(self, table=self.table[own], copies=None if self.copies is None else self.copies[own])


@dataclass(frozen=True, eq=False)
class LoraGroup:
    """Consecutive branches that use the same LoRAs."""

    first: int
    end: int
    applied: AppliedLoras


@dataclass(frozen=True, eq=False)
class BatchLoras:
    """The LoRAs of a packed batch."""

    slots: Column[LoraSlots]
    numbers: LeftOut[Mapping[nn.Module, int]]
    pictures: LeftOut[tuple[LoraGroup, ...]] = ()  # LoRAs for convolutions that see more than a pixel: never captured

    def patches(self, layer: nn.Module) -> bool:
        return self.numbers.get(layer) in self.slots.patched

    def copies(self, layers: Sequence[nn.Module]) -> bool:
        """True if branches have copies of the weights of all these layers, which lie as the layers' own do."""
        groups = {self.slots.joined.get(self.numbers.get(layer, -1)) for layer in layers}
        return len(groups) == 1 and None not in groups

    def patches_inside(self, module: nn.Module) -> list[nn.Module]:
        """The layers of a module that any branch patches."""
        return [layer for layer in module.modules() if self.patches(layer)]

    def of_branch(self, branch: int) -> "BatchLoras":
        """Those of one branch, as a batch of its own."""
        found = tuple(replace(one, first=0, end=1) for one in self.pictures if one.first <= branch < one.end)
        return replace(self, slots=self.slots.of_branch(branch), pictures=found)

    def rows(self, per_branch: int, bounds: Tensor | None = None) -> LowRankRows:
        """Rows of the branches: as many of each, or as `bounds` separate them."""
        return LowRankRows(self.slots.table, self.slots.rank_class, per_branch, bounds, self.slots.copies)

    def add(self, layer: nn.Module, rows: Tensor, out: Tensor, whose: LowRankRows) -> None:
        """Add to the output [rows, outputs] of a linear layer, in place."""
        add_low_rank(rows, out, whose, self.numbers[layer])

    def add_convolved(self, layer: nn.Conv2d, pictures: Tensor, out: Tensor) -> None:
        """Add to the output [branches, channels, rows, columns] of a convolution, in place."""
        if not sees_pictures(layer):
            rows, flat = as_rows(pictures), as_rows(out)
            self.add(layer, rows, flat, self.rows(len(flat) // len(self.slots.table)))
            if flat.data_ptr() != out.data_ptr():  # it is a copy
                out.copy_(flat.view(len(out), *out.shape[2:], -1).permute(0, 3, 1, 2))
            return
        for group in self.pictures:
            for low in group.applied.layers.get(layer, ()):
                own = slice(group.first, group.end)
                add_convolution(layer, low, pictures[own], out[own])

    def add_windows(self, layer: nn.Conv2d, windows: Tensor, out: Tensor, nums: Sequence[int]) -> None:
        """The same for windows of pictures, so many of each branch, which have what the convolution sees around
        them."""
        firsts = list(accumulate(nums, initial=0))
        for group in self.pictures:
            for low in group.applied.layers.get(layer, ()):
                own = slice(firsts[group.first], firsts[group.end])
                add_convolution(layer, low, windows[own], out[own], pads=False)


def batch_loras(branches: Sequence[AppliedLoras | None]) -> BatchLoras | None:
    """The LoRAs of a batch, from those of each branch; None if there are none."""
    found = [one if one and one.layers and not one.merging.is_merged else None for one in branches]
    first = next((one for one in found if one), None)
    return BatchLoras(find_slots(first, found), first.numbers, group_pictures(found)) if first else None


def find_slots(first: AppliedLoras, branches: Sequence[AppliedLoras | None]) -> LoraSlots:
    """The slots of a batch, which one of its LoRAs keeps: a batch that stays together fills them once. They hold the
    copies of weights only if all LoRAs have them."""
    copies = find_copies(branches)
    key = tuple((one and one.token, copy and copy.token) for one, copy in zip(branches, copies, strict=True))
    if key not in first.batches:
        if len(first.batches) >= MAX_BATCHES:
            first.batches.clear()
        own = [one.low_rank if one else None for one in branches]
        there = [one for one in own if one]
        first.batches[key] = LoraSlots(
            table=make_slots(own, first.low_rank.table.device),
            patched=frozenset().union(*(one.patched for one in there)),
            rank_class=RankClass.join([one.rank_class for one in there]),
            copies=place_copies(copies, first.low_rank.table.device) if any(copies) else None,
            copied=frozenset().union(*(copy.plan.groups for copy in copies if copy)),
        )
    return first.batches[key]


def find_copies(branches: Sequence[AppliedLoras | None]) -> list[WeightCopies | None]:
    """The copies of each branch, if all branches with LoRAs have them; else none."""
    found = [one.merging.copies if one else None for one in branches]
    is_whole = all(copies or not one for one, copies in zip(branches, found, strict=True))
    return found if is_whole else [None] * len(found)


def place_copies(copies: Sequence[WeightCopies | None], device: torch.device) -> Tensor:  # [branches]
    return to_device(np.array([one.table.data_ptr() if one else 0 for one in copies], dtype=np.int64), device)


def group_pictures(branches: Sequence[AppliedLoras | None]) -> tuple[LoraGroup, ...]:
    """Branches whose LoRAs patch convolutions that see more than a pixel."""
    groups: list[LoraGroup] = []
    for branch, applied in enumerate(branches):
        if applied is None or not applied.patches_pictures:
            continue
        last = groups[-1] if groups else None
        if last and last.end == branch and last.applied is applied:
            groups[-1] = LoraGroup(last.first, branch + 1, applied)
        else:
            groups.append(LoraGroup(branch, branch + 1, applied))
    return tuple(groups)


def as_rows(pictures: Tensor) -> Tensor:
    """[branches, channels, rows, columns] -> [pixels, channels]; a view if channels lie last."""
    return pictures.permute(0, 2, 3, 1).reshape(-1, pictures.shape[1])


def add_convolution(layer: nn.Conv2d, low: LowRank, pictures: Tensor, out: Tensor, pads: bool = True) -> None:
    down = low.down if low.down.ndim == 4 else low.down[:, :, None, None]
    hidden = F.conv2d(pictures, down, None, layer.stride, layer.padding if pads else 0, layer.dilation)
    out.add_(F.conv2d(hidden, low.up[:, :, None, None]), alpha=low.scale)


@contextmanager
def hooked(module: nn.Module, loras: BatchLoras, whose: LowRankRows | None) -> Iterator[None]:
    """While inside, the layers of a module that is called as a whole add what LoRAs patch. `whose` separates the rows
    of the branches; None: all rows belong to the first branch."""

    def add(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            loras.add_convolved(layer, args[0], out)
            return
        rows, flat = args[0].flatten(0, -2), out.view(-1, out.shape[-1])
        loras.add(layer, rows, flat, whose or loras.rows(len(rows)))

    with ExitStack() as hooks:
        for layer in loras.patches_inside(module):
            hooks.enter_context(layer.register_forward_hook(add))  # leaving it removes the hook
        yield

"""Linear layers over packed rows: the one place where a product sees its layer, its rows and who owns them.

Every product over rows of a batch goes through `linear` or `linears`, so that whatever depends on the owner of a row
(an adapter per job) or on the layer (products of low precision) has a single place.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.adapters.applied import BatchLoras, hooked
from instgenie.kernels.grouped_linear import grouped_linear
from instgenie.kernels.low_rank import LowRankRows, start_low_rank
from instgenie.kernels.quantize import Rows, as_tensor
from instgenie.kernels.switch import runs_fused
from instgenie.models.layers.fp8_linear import Fp8Linear, multiply_fp8

MIN_ROWS = 128  # per branch, for which weights of its own are read: with fewer, LoRAs' own matrices are less to read


@dataclass(frozen=True, eq=False)
class Owners:
    """Which branch of a batch owns each of its packed rows: `index[row] // per_branch`.

    Nothing is computed until `branches` is asked for, so an owner costs no launch where it is not read.
    """

    index: Tensor | None = None  # [rows]; None stands for the numbers of the rows
    per_branch: int = 1
    loras: BatchLoras | None = None  # of the branches; None: no branch has any
    bounds: Tensor | None = None  # [branches + 1], between the rows of the branches, if these are known to LoRAs
    times: Tensor | None = None  # [rows], which row of modulation each reads; None: that of its branch

    @property
    def modulated_by(self) -> Tensor | None:
        """Which row of modulation each row reads [rows]; None if there is a single one."""
        return self.index if self.times is None else self.times

    def branches(self, rows: Rows) -> Tensor:
        """The number of the owner of each row [rows]."""
        values = rows if isinstance(rows, Tensor) else rows.values
        index = torch.arange(values.shape[:-1].numel(), device=values.device) if self.index is None else self.index
        return index // self.per_branch

    def of(self, loras: BatchLoras | None) -> "Owners":
        """The same owners with the LoRAs of a batch."""
        return self if loras is None else replace(self, loras=loras)

    @cached_property
    def lora_rows(self) -> LowRankRows:
        """Whose rows they are, as LoRAs need it. Owners that outlive a pass must have bounds, or as many rows of each
        branch in every pass."""
        assert self.loras is not None
        if self.index is None or self.bounds is not None:
            return self.loras.rows(self.per_branch, self.bounds)
        index = self.index if self.per_branch == 1 else self.index // self.per_branch
        numbers = torch.arange(len(self.loras.slots.table) + 1, device=index.device)
        return self.loras.rows(0, torch.searchsorted(index, numbers))

    def patches(self, layer: nn.Module) -> bool:
        return self.loras is not None and self.loras.patches(layer)

    def has_weights(self, layers: Sequence[nn.Module], rows: Rows) -> bool:
        """True if each branch multiplies by weights of its own, which contain its LoRAs. Layers are multiplied at once
        if their weights lie one behind the other."""
        if self.loras is None or not self.loras.copies(layers) or not isinstance(rows, Tensor):
            return False
        return rows.shape[:-1].numel() >= MIN_ROWS * len(self.loras.slots.table)

    def multiply_own(self, layer: nn.Module, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the rows of each branch by its weights of a layer, and of those that are joined to it, or by the
        given ones where it has none."""
        assert self.loras is not None
        flat = rows.reshape(-1, rows.shape[-1])
        out = grouped_linear(flat, weight, bias, self.lora_rows, self.loras.numbers[layer])
        return out.view(*rows.shape[:-1], out.shape[-1])

    def add(self, layer: nn.Module, rows: Rows, out: Tensor) -> Tensor:
        """Add what the LoRAs of the branches patch to the output of a layer. Costs nothing where there are none."""
        if self.loras is not None and self.loras.patches(layer):
            values = as_tensor(rows, out.dtype)
            flat = out if out.ndim == 2 else out.view(-1, out.shape[-1])
            self.loras.add(layer, values.reshape(-1, values.shape[-1]), flat, self.lora_rows)
        return out

    def multiply(self, layers: Sequence[nn.Module], rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of layers whose weights lie one behind the other, with what LoRAs patch, which is written before
        the product with the weights is added to it. Needs kernels."""
        assert self.loras is not None
        numbers, widths = [self.loras.numbers[layer] for layer in layers], [num_outputs(layer) for layer in layers]
        flat = rows.reshape(-1, rows.shape[-1])
        out = start_low_rank(flat, self.lora_rows, numbers, widths, bias).addmm_(flat, weight.t())
        return out.view(*rows.shape[:-1], out.shape[-1])


EACH_BRANCH = Owners()  # one row per branch


def linear(layer: nn.Module, rows: Rows, owners: Owners | None) -> Tensor:
    """Multiply rows [..., channels] by a linear layer or a convolution of one by one. Rows without owners are a
    template's own, which no branch may change."""
    if owners is not None and owners.has_weights([layer], rows):
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        assert isinstance(rows, Tensor)
        return owners.multiply_own(layer, rows, layer.weight.flatten(1), layer.bias)
    if owners is not None and starts_with_loras([layer], rows, owners):
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        assert isinstance(rows, Tensor)
        return owners.multiply([layer], rows, layer.weight.flatten(1), layer.bias)
    if isinstance(layer, nn.Conv2d):  # with its bias in the same launch
        assert isinstance(rows, Tensor)
        out: Tensor = F.linear(rows, layer.weight.flatten(1), layer.bias)
    else:
        out = layer(rows)
    return out if owners is None else owners.add(layer, rows, out)


def starts_with_loras(layers: Sequence[nn.Module], rows: Rows, owners: Owners) -> bool:
    """True if what LoRAs add is written first, and the product with the weights added to it."""
    return (
        owners.loras is not None
        and any(map(owners.patches, layers))
        and all(type(layer) in (nn.Linear, nn.Conv2d) for layer in layers)
        and isinstance(rows, Tensor)
        and runs_fused(rows)
    )


def num_outputs(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return len(layer.weight)


def call(module: nn.Module, owners: Owners, *inputs: Tensor) -> Tensor:
    """Call a module as a whole. Its layers that LoRAs patch add their products to the rows of each branch."""
    with patched(module, owners):
        out: Tensor = module(*inputs)
    return out


def patched(module: nn.Module | None, owners: Owners) -> AbstractContextManager[None]:
    """While inside, calls of a module add what LoRAs patch."""
    return hooked(module, owners.loras, owners.lora_rows) if module and owners.loras else nullcontext()


def linears(layers: Sequence[nn.Module], rows: Rows, owners: Owners | None) -> Sequence[Tensor]:
    """Multiply the same rows [rows, channels] by several layers: in one product where `join` has put their weights one
    behind the other. The results are then columns of one tensor."""
    alike = find_alike(layers)
    product = multiply_joined(alike, rows, owners) if alike else None
    if product is None:
        return [linear(layer, rows, owners) for layer in layers]
    columns: Sequence[Tensor] = product.split([layer.out_features for layer in alike], dim=1)
    if owners is None or owners.has_weights(layers, rows) or starts_with_loras(layers, rows, owners):
        return columns
    return list(map(owners.add, layers, [rows] * len(layers), columns))


def linear_columns(layer: nn.Module, rows: Rows, owners: Owners | None, first: int, end: int) -> Tensor:
    """The columns [first, end) of a product, without the others where nothing but the layer's own weights makes
    them."""
    is_patched = owners is not None and owners.patches(layer)
    if isinstance(layer, Fp8Linear) and not is_patched:
        bias = None if layer.bias is None else layer.bias[first:end]
        return multiply_fp8(rows, layer.weight[first:end], layer.scale[first:end], bias, layer.dtype)
    if type(layer) is nn.Linear and not is_patched:
        assert isinstance(rows, Tensor)
        return F.linear(rows, layer.weight[first:end], None if layer.bias is None else layer.bias[first:end])
    return linear(layer, rows, owners)[:, first:end]


def find_alike(layers: Sequence[nn.Module]) -> list[nn.Linear] | list[Fp8Linear]:
    """The layers, if all of them are plain or all of low precision, with biases or without; else none. A layer that an
    adapter wraps is neither."""
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    low = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    found = plain or low
    is_alike = len(found) == len(layers) and len({layer.bias is None for layer in found}) == 1
    return found if is_alike else []


def multiply_joined(layers: Sequence[nn.Linear | Fp8Linear], rows: Rows, owners: Owners | None) -> Tensor | None:
    """One product for all layers, with what LoRAs add where they are written first or are in the weights; None if the
    weights lie apart."""
    weight, first = as_one([layer.weight for layer in layers]), layers[0]
    if weight is None:
        return None
    bias = None if first.bias is None else as_one([layer.bias for layer in layers])
    if isinstance(first, Fp8Linear):
        scale = as_one([layer.scale for layer in layers if isinstance(layer, Fp8Linear)])
        assert scale is not None
        return multiply_fp8(rows, weight, scale, bias, first.dtype)
    assert isinstance(rows, Tensor)
    if owners is not None and owners.has_weights(layers, rows):
        return owners.multiply_own(first, rows, weight, bias)
    if owners is not None and any(owners.has_weights([layer], rows) for layer in layers):
        return None  # they lie apart in the copies
    if owners is not None and starts_with_loras(layers, rows, owners):
        return owners.multiply(layers, rows, weight, bias)
    return F.linear(rows, weight, bias)


def join(layers: Sequence[nn.Module]) -> None:
    """Put the weights of layers with the same input one behind the other in memory, if they are alike; each keeps its
    own as a view. Layers may be without weights."""
    alike = find_alike(layers)
    for name, _ in alike[0].named_parameters() if alike else ():
        parameters = [layer.get_parameter(name) for layer in alike]
        parts = [parameter.detach().view(torch.uint8) for parameter in parameters]  # of any dtype
        together = torch.cat(parts).split([len(part) for part in parts])
        for parameter, part in zip(parameters, together, strict=True):
            parameter.data = part.view(parameter.dtype)


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors as one tensor, if they lie one behind the other in the same memory."""
    first = tensors[0]
    for before, after in pairwise(tensors):
        is_next = after.storage_offset() == before.storage_offset() + before.numel()
        if not is_next or after.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())

"""Rows that are read from an address in a table: a captured graph reads from another place each time it runs."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from instgenie.kernels.packed import PackedRows, is_packed, row_size, unpacked
from instgenie.types import CacheDtype


@dataclass(frozen=True, eq=False)
class Addresses:
    """The address of each entry's contiguous rows [parts, tokens, width] at the time they are read: in the device's
    memory, or in other memory that the device can read."""

    table: Tensor  # [entries], int64
    dtypes: tuple[CacheDtype, ...] = ()  # per entry, in which its rows are kept; none: in the dtype they are read in

    def dtype(self, entry: int) -> CacheDtype:
        return self.dtypes[entry] if self.dtypes else "model"

    def __getitem__(self, entry: int) -> "Address":
        return Address(self.table[entry : entry + 1], self.dtype(entry))


@dataclass(frozen=True, eq=False)
class Address:
    """The address of one entry."""

    table: Tensor  # [1], int64
    dtype: CacheDtype = "model"


RowSource: TypeAlias = Tensor | PackedRows | Address | None  # None if its rows are not read
RowSources: TypeAlias = list[RowSource] | Addresses


class RawMemory:
    """Memory of a CUDA device as other libraries describe it to each other."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor that lies at an address, without a copy: its memory belongs to somebody else."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(RawMemory(address, num_bytes), device=device).view(dtype).view(*shape)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype).view(*shape)


def look_up(
    source: Tensor | PackedRows | Address, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, CacheDtype]:
    """The rows as they are kept, without a copy, and in which format; they are [parts, tokens, width] when unpacked. An
    address must be in the memory of this process."""
    if isinstance(source, Tensor):
        return source, "model"
    if isinstance(source, PackedRows):
        return source.rows, source.dtype
    assert not source.table.is_cuda
    *counts, width = shape
    kept_dtype, size = (torch.uint8 if is_packed(source.dtype) else dtype), row_size(width, source.dtype)
    return tensor_at(int(source.table), (*counts, size), kept_dtype, source.table.device), source.dtype


def look_up_values(source: Tensor | PackedRows | Address, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The rows, unpacked where they are packed."""
    rows, packing = look_up(source, shape, dtype)
    return unpacked(rows, packing, dtype) if is_packed(packing) else rows

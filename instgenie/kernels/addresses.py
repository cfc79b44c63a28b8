"""Rows that are read from an address in a table: a captured graph reads from another place each time it runs."""

import ctypes
import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Addresses:
    """The address of each entry's contiguous rows [parts, tokens, width] at the time they are read: in the device's
    memory, or in other memory that the device can read."""

    table: Tensor  # [entries], int64

    def __getitem__(self, entry: int) -> "Address":
        return Address(self.table[entry : entry + 1])


@dataclass(frozen=True, eq=False)
class Address:
    """The address of one entry."""

    table: Tensor  # [1], int64


RowSource: TypeAlias = Tensor | Address | None  # None if its rows are not read
RowSources: TypeAlias = list[RowSource] | Addresses


def look_up(source: Tensor | Address, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The rows themselves, without a copy; an address must be in the memory of this process."""
    if isinstance(source, Tensor):
        return source
    assert not source.table.is_cuda
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(int(source.table))
    return torch.frombuffer(memory, dtype=dtype).view(shape)

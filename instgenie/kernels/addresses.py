"""Rows that are read wherever an address says: what is captured once reads, each time it runs, from another place."""

import ctypes
import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Addresses:
    """Of each entry, where its rows [parts, tokens, width] lie in one piece when they are read: in the memory of the
    device, or wherever that can read."""

    table: Tensor  # [entries], int64

    def __getitem__(self, entry: int) -> "Address":
        return Address(self.table[entry : entry + 1])


@dataclass(frozen=True, eq=False)
class Address:
    table: Tensor  # [1], int64


Source: TypeAlias = Tensor | Address | None  # None: nothing is read of it
Sources: TypeAlias = list[Source] | Addresses


def look_up(source: Tensor | Address, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The rows themselves, without a copy; an address is one in the memory of this process."""
    if isinstance(source, Tensor):
        return source
    assert not source.table.is_cuda
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(int(source.table))
    return torch.frombuffer(memory, dtype=dtype).view(shape)

"""Weights in files: where each tensor lies in a safetensors file, and the file as mapped memory. Reads no weights.

Pages of a mapped file belong to the system's page cache. All processes that map a file share them, until one writes:
it then gets a copy of that page for itself.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from instgenie.errors import ModelError
from instgenie.machine.stored_dtypes import STORED_DTYPES


@dataclass(frozen=True)
class WeightsFile:
    path: Path

    @cached_property
    def storage(self) -> torch.UntypedStorage:
        """The whole file as mapped memory."""
        mapped: Any = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.path.stat().st_size)
        return cast(torch.UntypedStorage, mapped)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: WeightsFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte of the file

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize

    def mapped(self) -> Tensor:
        """The tensor in the mapped file; a copy if it does not begin where such numbers may lie."""
        if self.first % self.dtype.itemsize:
            return (
                view_file(self.file, torch.uint8, (self.num_bytes,), self.first)
                .clone()
                .view(self.dtype)
                .view(self.shape)
            )
        return view_file(self.file, self.dtype, self.shape, self.first)


def view_file(file: WeightsFile, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> Tensor:
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(file.storage, first // dtype.itemsize, shape, strides)


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises a ModelError if it is no whole safetensors file."""
    try:
        with safe_open(path, framework="numpy"):  # it checks the whole header, and reserves no memory
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            fields: Mapping[str, dict[str, list[int]]] = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(f"{path} ({size:,} bytes) is not a whole safetensors file: {error}") from error
    weights = WeightsFile(path)
    return dict(stored_in(weights, fields, 8 + length))


def stored_in(
    file: WeightsFile, fields: Mapping[str, dict[str, list[int]]], start: int
) -> Iterator[tuple[str, StoredTensor]]:
    for name, about in fields.items():
        if name == "__metadata__":
            continue
        dtype = str(about["dtype"])
        if dtype not in STORED_DTYPES:
            raise ModelError(f"{file.path}: {name!r} is in {dtype}: one of {', '.join(STORED_DTYPES)} is expected")
        yield name, StoredTensor(file, STORED_DTYPES[dtype], tuple(about["shape"]), start + about["data_offsets"][0])

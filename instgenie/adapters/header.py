"""The header of a safetensors file, read and checked without torch: names, types and shapes of its tensors."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from instgenie.errors import LoraError

MAX_HEADER_BYTES = 32 * 2**20  # a LoRA of the largest model has less than one
MAX_NUMBER = 2**48  # of a shape or of bytes
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class TensorInfo:
    dtype: str
    shape: tuple[int, ...]
    first: int  # byte of the file


@dataclass(frozen=True)
class WeightsHeader:
    """What a file says about itself."""

    path: Path
    tensors: Mapping[str, TensorInfo]  # in the order of the file
    num_bytes: int  # of all tensors
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RawHeader:
    """The header of a file, not yet understood."""

    path: Path
    content: bytes
    num_bytes: int  # of the file behind the header

    @property
    def layout(self) -> str:
        """A name for what a file says about itself. Those of one trainer for one model often say the same."""
        return hashlib.sha256(b"%d " % self.num_bytes + self.content).hexdigest()


def read_header(path: Path) -> WeightsHeader:
    """Read a header and check that the file has room for what it names. Raises a LoraError."""
    with open_weights(path) as file:
        return parse_header(read_raw(path, file))


@contextmanager
def open_weights(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its header and its weights: whatever takes its place meanwhile is another file."""
    if path.suffix != ".safetensors":
        raise LoraError(f"{path.name} is not a LoRA: a safetensors file is expected")
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise LoraError(f"{path.name} cannot be read: {error.strerror or error}") from error


def read_raw(path: Path, file: BinaryIO) -> RawHeader:
    start, size = file.read(8), os.fstat(file.fileno()).st_size
    length = header_length(path, start, size)
    return RawHeader(path, file.read(length), size - 8 - length)


def header_length(path: Path, start: bytes, size: int) -> int:
    """The bytes of a header behind the first eight of a file of so many."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or size - 8 - length < 0 or length > MAX_HEADER_BYTES:
        raise LoraError(f"{path.name} is not a whole safetensors file: it has {size:,} bytes")
    return length


def parse_header(raw: RawHeader) -> WeightsHeader:
    path, start = raw.path, 8 + len(raw.content)
    try:
        fields = json.loads(raw.content)
    except (ValueError, RecursionError) as error:
        raise LoraError(f"{path.name} is not a safetensors file: its header is not JSON") from error
    if not isinstance(fields, dict):
        raise LoraError(f"{path.name} is not a safetensors file: its header is a {type(fields).__name__}")
    metadata = fields.pop("__metadata__", {})
    tensors = {name: read_tensor_info(path, name, value, raw.num_bytes, start) for name, value in fields.items()}
    if not tensors:
        raise LoraError(f"{path.name} is not a LoRA: it has no tensors")
    needed = sum(math.prod(about.shape) * ITEM_BYTES[about.dtype] for about in tensors.values())
    if needed > raw.num_bytes:
        raise LoraError(f"{path.name} is damaged: its tensors take {needed:,} bytes, but it has {raw.num_bytes:,}")
    return WeightsHeader(path, tensors, raw.num_bytes, metadata if isinstance(metadata, dict) else {})


def read_tensor_info(path: Path, name: str, value: Any, num_bytes: int, start: int) -> TensorInfo:
    try:
        dtype, shape, (first, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        is_sound = all(type(number) is int and 0 <= number < MAX_NUMBER for number in (*shape, first, end))
    except (KeyError, TypeError, ValueError) as error:
        raise LoraError(f"{path.name} is not a safetensors file: the entry of {name!r} is malformed") from error
    if not is_sound or first > end:
        raise LoraError(f"{path.name} is not a safetensors file: the entry of {name!r} is malformed")
    if dtype not in ITEM_BYTES:
        raise LoraError(f"{path.name} is not a LoRA: {name!r} is in {dtype}, floating-point numbers are expected")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if needed != end - first:
        raise LoraError(
            f"{path.name} is damaged: {name!r} of shape {list(shape)} in {dtype} takes {needed:,} bytes, but has "
            f"{end - first:,}"
        )
    if end > num_bytes:
        raise LoraError(f"{path.name} is truncated: {name!r} ends at byte {end:,} of {num_bytes:,}")
    return TensorInfo(dtype, shape, start + first)

"""The header of a safetensors file, read and checked without torch: names, types and shapes of its tensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instgenie.errors import LoraError

MAX_HEADER_BYTES = 32 * 2**20  # a LoRA of the largest model has less than one
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


def read_header(path: Path) -> WeightsHeader:
    """Read a header and check that the file has room for what it names. Raises a LoraError."""
    if path.suffix != ".safetensors":
        raise LoraError(f"{path.name} is not a LoRA: a safetensors file is expected")
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            num_bytes = path.stat().st_size - 8 - length
            if len(start) < 8 or num_bytes < 0 or length > MAX_HEADER_BYTES:
                raise LoraError(f"{path.name} is not a whole safetensors file: it has {path.stat().st_size:,} bytes")
            fields = json.loads(file.read(length))
    except OSError as error:
        raise LoraError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoraError(f"{path.name} is not a safetensors file: its header is not JSON") from error
    if not isinstance(fields, dict):
        raise LoraError(f"{path.name} is not a safetensors file: its header is a {type(fields).__name__}")
    metadata = fields.pop("__metadata__", {})
    tensors = {name: read_tensor_info(path, name, value, num_bytes, 8 + length) for name, value in fields.items()}
    if not tensors:
        raise LoraError(f"{path.name} is not a LoRA: it has no tensors")
    return WeightsHeader(path, tensors, num_bytes, metadata if isinstance(metadata, dict) else {})


def read_tensor_info(path: Path, name: str, value: Any, num_bytes: int, start: int) -> TensorInfo:
    try:
        dtype, shape, (first, end) = value["dtype"], tuple(map(int, value["shape"])), value["data_offsets"]
        needed = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - first
        is_sound = min(shape, default=0) >= 0 and 0 <= first <= end
    except (KeyError, TypeError, ValueError) as error:
        raise LoraError(f"{path.name} is not a safetensors file: the entry of {name!r} is malformed") from error
    if not is_sound or needed != end - first:
        raise LoraError(
            f"{path.name} is damaged: {name!r} of shape {list(shape)} in {dtype} takes {needed:,} bytes, but has "
            f"{end - first:,}"
        )
    if end > num_bytes:
        raise LoraError(f"{path.name} is truncated: {name!r} ends at byte {end:,} of {num_bytes:,}")
    if dtype not in ITEM_BYTES:
        raise LoraError(f"{path.name} is not a LoRA: {name!r} is in {dtype}, floating-point numbers are expected")
    return TensorInfo(dtype, shape, start + first)

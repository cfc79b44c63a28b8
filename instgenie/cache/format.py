"""Spans as safetensors, in files and in bytes, written so that whatever befalls them later is noticed. Knows one span
at a time; where it is kept is not its matter.

The header has format, key, steps and checksum. What is read is believed only if it is what was asked for, to the last
byte.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from instgenie.activations import Key, Span, parse_key

FORMAT = "1"  # of what a file holds; another is a miss
SUFFIX, PARTIAL, USED = ".safetensors", ".partial", "used"


class DamagedError(Exception):
    """What was read is not what its name says."""


def file_name(steps: range) -> str:
    return f"{steps.start:04}-{steps.stop - 1:04}{SUFFIX}"


def is_template(name: str) -> bool:
    """Whether it can be the name of a key."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", name))


def write_file(path: Path, key: Key, span: Span) -> None:
    """Complete and on the disk when this returns. Whether the name survives a power cut does not matter: a file that
    is gone is a miss."""
    tensors = name_tensors(span)
    save_file(tensors, path, make_header(key, span.steps, tensors))
    with open(path, "rb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.fsync(file.fileno())


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """safe_open looks for the file twice, and who evicts may have come in between."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def read_file(path: Path, key: Key, steps: range) -> Span:
    """Its tensors are views of the file."""
    with opened(path) as file:
        header = file.metadata()
        check_header(header, key, steps)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return make_span(steps, header, tensors)


def check_file(path: Path, key: Key, steps: range) -> None:
    """Looks at the header alone."""
    with opened(path) as file:
        check_header(file.metadata(), key, steps)


def read_key(path: Path) -> Key:
    """Whose file it is; a ValueError if it does not say so."""
    with opened(path) as file:
        return parse_key((file.metadata() or {}).get("key", ""))


def encode(key: Key, span: Span) -> bytes:
    tensors = name_tensors(span)
    return save(tensors, make_header(key, span.steps, tensors))


def decode(data: bytes, key: Key, steps: range) -> Span:
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedError(str(error)) from None
    check_header(header, key, steps)
    return make_span(steps, header, tensors)


def name_tensors(span: Span) -> dict[str, Tensor]:
    rows = {f"rows.{place:04}": rows for place, rows in enumerate(span.rows)}
    return {name: tensor.cpu().contiguous() for name, tensor in (rows | {"time": span.time}).items()}


def make_header(key: Key, steps: range, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return describe(key, steps) | {"checksum": checksum(tensors)}


def describe(key: Key, steps: range) -> dict[str, str]:
    return {"format": FORMAT, "key": key.text, "steps": f"{steps.start} to {steps.stop - 1}"}


def check_header(header: Mapping[str, str] | None, key: Key, steps: range) -> None:
    for name, expected in describe(key, steps).items():
        if (header or {}).get(name) != expected:
            raise DamagedError(f"its {name} is another")


def make_span(steps: range, header: Mapping[str, str], tensors: dict[str, Tensor]) -> Span:
    if checksum(tensors) != header.get("checksum"):
        raise DamagedError("its checksum is wrong")
    time = tensors.pop("time")
    return Span(steps, tuple(tensors[name] for name in sorted(tensors)), time)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, shapes and bytes. It guards against accidents, not against forgers, who cannot write here; and
    it is several times as fast as a cryptographic digest, so that reading the file remains what takes the time."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"

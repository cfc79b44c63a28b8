"""Spans and pictures as safetensors, in files and in bytes, written so that any later damage is noticed. Knows one span
at a time; does not know where it is kept.

The header has format, key, steps and checksum. Data is trusted only if all of them are as expected.
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

from instgenie.jobs.activations import Key, Span, parse_key
from instgenie.types import Pixels

FORMAT = "1"  # version of the layout; a file of another version is a miss
SUFFIX, USED, ASKED = ".safetensors", "used", "asked"
PICTURE = f"picture{SUFFIX}"
HEAD_BYTES = 2**17  # the header of a picture ends within these


class DamagedError(Exception):
    """The data does not match its name or its checksum."""


def file_name(steps: range) -> str:
    return f"{steps.start:04}-{steps.stop - 1:04}{SUFFIX}"


def is_template(name: str) -> bool:
    """True if this can be the name of a key."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", name))


def write_file(path: Path, key: Key, span: Span) -> None:
    write(path, name_tensors(span), describe(key, span.steps))


def write_picture(path: Path, key: Key, picture: Pixels) -> None:
    write(path, name_pixels(picture), describe_picture(key))


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    save_file(tensors, path, header | {"checksum": checksum(tensors)})
    os.chmod(path, 0o600)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file; if it is evicted between the two times that safe_open looks for it, that is a FileNotFoundError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None


def read_file(path: Path, key: Key, steps: range) -> Span:
    """The span, whose tensors are views of the file."""
    return make_span(steps, read(path, describe(key, steps)))


def read_picture(path: Path, key: Key) -> Pixels:
    return make_picture(read(path, describe_picture(key)))


def read(path: Path, expected: Mapping[str, str]) -> dict[str, Tensor]:
    with opened(path) as file:
        header = file.metadata()
        check_header(header, expected)
        return verified(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def check_file(path: Path, key: Key, steps: range) -> None:
    """Check the header only."""
    with opened(path) as file:
        check_header(file.metadata(), describe(key, steps))


def read_key(path: Path) -> Key:
    """The key in the header. Raise a ValueError if there is none."""
    with opened(path) as file:
        return parse_key((file.metadata() or {}).get("key", ""))


def read_head(data: bytes) -> tuple[Key, tuple[int, int]]:
    """The key of a picture and its (height, width), from the first bytes of its file. May raise a ValueError."""
    head = parse_head(data)
    try:
        height, width, _ = head["pixels"]["shape"]
        return parse_key(head["__metadata__"]["key"]), (height, width)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a picture: {error}") from None


def parse_head(data: bytes) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return head


def encode(key: Key, span: Span) -> bytes:
    return to_bytes(name_tensors(span), describe(key, span.steps))


def encode_picture(key: Key, picture: Pixels) -> bytes:
    return to_bytes(name_pixels(picture), describe_picture(key))


def to_bytes(tensors: dict[str, Tensor], header: dict[str, str]) -> bytes:
    return save(tensors, header | {"checksum": checksum(tensors)})


def decode(data: bytes, key: Key, steps: range) -> Span:
    return make_span(steps, from_bytes(data, describe(key, steps)))


def decode_picture(data: bytes, key: Key) -> Pixels:
    return make_picture(from_bytes(data, describe_picture(key)))


def from_bytes(data: bytes, expected: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        tensors = load(data)
        header = parse_head(data).get("__metadata__")
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedError(str(error)) from None
    check_header(header, expected)
    return verified(header or {}, tensors)


def name_tensors(span: Span) -> dict[str, Tensor]:
    rows = {f"rows.{place:04}": rows for place, rows in enumerate(span.rows)}
    return {name: tensor.cpu().contiguous() for name, tensor in (rows | {"time": span.time}).items()}


def name_pixels(picture: Pixels) -> dict[str, Tensor]:
    return {"pixels": torch.tensor(picture)}


def describe(key: Key, steps: range) -> dict[str, str]:
    return {"format": FORMAT, "key": key.text, "steps": f"{steps.start} to {steps.stop - 1}"}


def describe_picture(key: Key) -> dict[str, str]:
    return {"format": FORMAT, "key": key.text, "picture": "all of it"}


def check_header(header: Mapping[str, str] | None, expected: Mapping[str, str]) -> None:
    for name, value in expected.items():
        if (header or {}).get(name) != value:
            raise DamagedError(f"its {name} is not the expected one")


def verified(header: Mapping[str, str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if checksum(tensors) != header.get("checksum"):
        raise DamagedError("its checksum is wrong")
    return tensors


def make_span(steps: range, tensors: dict[str, Tensor]) -> Span:
    time = tensors.pop("time")
    return Span(steps, tuple(tensors[name] for name in sorted(tensors)), time)


def make_picture(tensors: Mapping[str, Tensor]) -> Pixels:
    picture: Pixels = tensors["pixels"].numpy()
    return picture


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of names, shapes and bytes. It guards against accidents, not against attackers, who have no access to
    these files. It is several times as fast as a cryptographic digest, so reading a file takes longer than checking it.
    """
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"

"""Messages between peers, which copy templates from each other's memory, and the checks of what arrives. A span travels
as its bytes lie in memory, in pieces that each have a checksum. Knows no socket."""

import math
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from instgenie.cache.buffers import TensorSpec, carve
from instgenie.cache.format import DamagedError
from instgenie.jobs.activations import Key, Span

LAYOUT = "1"  # version of the layout of a step in memory; peers of another version share nothing
PIECE_BYTES = 2**20
MAX_REQUEST_BYTES = 2**20


class PeerMessage(Struct, frozen=True, tag=True):
    """Base of the messages; its class name travels with it."""


# requests: each names the layout and the whole key, which has the version of the code that made the numbers


class FindSpans(PeerMessage, frozen=True):
    """Asks which spans of a template are in memory. `SpansFound` answers it."""

    layout: str
    key: str


class FindLayout(PeerMessage, frozen=True):
    """Asks how a span lies in memory. `SpanLayout` or `SpanGone` answers it."""

    layout: str
    key: str
    steps: tuple[int, int]


class ReadPiece(PeerMessage, frozen=True):
    """Asks for some bytes of a span. `SpanPiece` or `SpanGone` answers it."""

    layout: str
    key: str
    steps: tuple[int, int]
    offset: int
    num_bytes: int


# answers


class SpansFound(PeerMessage, frozen=True):
    spans: tuple[tuple[int, int], ...]


class SpanLayout(PeerMessage, frozen=True):
    """The tensors of one step, as (dtype, shape), in the order in which they lie in memory."""

    num_bytes: int  # of the whole span
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class SpanPiece(PeerMessage, frozen=True):
    """Frames: the bytes."""

    offset: int
    checksum: int


class SpanGone(PeerMessage, frozen=True):
    """The span is not in memory, or no longer."""


PeerRequest: TypeAlias = FindSpans | FindLayout | ReadPiece
PeerAnswer: TypeAlias = SpansFound | SpanLayout | SpanPiece | SpanGone

encode_message = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(PeerRequest).decode
decode_answer = msgspec.msgpack.Decoder(PeerAnswer).decode


def ends_of(steps: range) -> tuple[int, int]:
    return steps.start, steps.stop


def describe_layout(specs: Sequence[TensorSpec], num_bytes: int) -> SpanLayout:
    return SpanLayout(num_bytes, tuple((str(spec.dtype).removeprefix("torch."), spec.shape) for spec in specs))


def read_layout(layout: SpanLayout, key: Key, steps: range, max_bytes: int) -> list[TensorSpec]:
    """The tensors of one step. Raises a DamagedError if the layout is none, or too large."""
    specs = []
    for name, shape in layout.tensors:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or any(length < 0 for length in shape):
            raise DamagedError(f"a tensor of type {name} and shape {shape} is not expected")
        specs.append(TensorSpec(shape, dtype))
    per_step = sum(spec.num_bytes for spec in specs)
    if len(specs) < 2 or layout.num_bytes != len(steps) * per_step:
        raise DamagedError(f"{layout.num_bytes} bytes are not {len(steps)} steps of {per_step} bytes")
    if key.num_kept * per_step > max_bytes:
        raise DamagedError(f"a template of {key.num_kept * per_step} bytes is larger than {max_bytes} bytes")
    return specs


def span_of(memory: Tensor, specs: Sequence[TensorSpec], steps: range) -> Span:
    """View memory [bytes of a span] as the span."""
    *rows, time = carve(memory.view(len(steps), -1), specs)
    return Span(steps, tuple(by_step.transpose(0, 1) for by_step in rows), time)


def checksum(data: Tensor) -> int:
    """CRC-32 of bytes on the CPU. It guards against accidents; the connection guards against attackers."""
    return zlib.crc32(data.numpy().data)


def num_pieces(num_bytes: int) -> int:
    return math.ceil(num_bytes / PIECE_BYTES)

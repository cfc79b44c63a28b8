"""Where the tensors of a LoRA file go in memory, found from its header alone. Files of one layout share a plan.

All weights come to lie in one block, each tensor at a place that kernels like, whatever lies between them in the file:
the system reads a stretch of the file into many places at once. Needs no torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from instgenie.adapters.fitting import Fitted
from instgenie.adapters.header import ITEM_BYTES, TensorInfo, WeightsHeader

ALIGNMENT = 16  # numbers between the starts of tensors: 16 bytes or more
STRETCH_BYTES = 8 * 2**20  # that are read at once, in so many places; the system takes 1,024
MAX_PLACES = 512


@dataclass(frozen=True)
class LoraPiece:
    """Where the two tensors of a layer lie in the block."""

    part: str
    layer: str
    down: int  # first number
    down_shape: tuple[int, ...]
    up: int
    up_shape: tuple[int, ...]
    scale: float  # alpha / rank


@dataclass(frozen=True)
class FileSpan:
    """Bytes of the file, and where they go in the block."""

    first: int
    place: int
    num_bytes: int


@dataclass(frozen=True)
class DtypeGroup:
    """Bytes of the block whose numbers have one dtype."""

    dtype: str
    first: int
    end: int


@dataclass(frozen=True)
class LoraPlan:
    groups: tuple[DtypeGroup, ...]
    stretches: tuple[tuple[FileSpan, ...], ...]  # each has no gaps in the file
    pieces: tuple[LoraPiece, ...]  # of those with an alpha in the file, the scale is 1 / rank
    alphas: Mapping[str, TensorInfo]  # by key
    alpha_keys: tuple[str | None, ...]  # per piece

    @property
    def num_bytes(self) -> int:
        return self.groups[-1].end if self.groups else 0


@dataclass(frozen=True)
class StoredNumbers:
    """Some numbers of a tensor in the file."""

    about: TensorInfo
    first: int  # number
    count: int
    swaps_halves: bool = False

    def spans(self, place: int) -> Iterator[FileSpan]:
        size = ITEM_BYTES[self.about.dtype]
        first, num_bytes = self.about.first + self.first * size, self.count * size
        half = num_bytes // 2 if self.swaps_halves else 0
        yield FileSpan(first + half, place, num_bytes - half)
        if half:
            yield FileSpan(first, place + half, half)


def make_plan(header: WeightsHeader, fitted: Sequence[Fitted]) -> LoraPlan:
    stored: dict[tuple[str, int], StoredNumbers] = {}  # by key and first number; layers may share one
    for one in fitted:
        stored[one.down, 0] = StoredNumbers(header.tensors[one.down], 0, math.prod(header.tensors[one.down].shape))
        for first, count in up_parts(one):
            stored[one.up, first] = StoredNumbers(header.tensors[one.up], first, count, one.swaps_halves)
    groups, numbers, spans = lay_out(stored)
    pieces, alpha_keys = [], []
    for one in fitted:
        shape = header.tensors[one.down].shape
        down_shape = shape if shape[2:] not in ((), (1, 1)) else (one.rank, math.prod(shape[1:]))
        scale = 1 / one.rank if one.alpha else 1.0 if one.settings_scale is None else one.settings_scale
        for layer, (first, count) in zip(one.layers, up_parts(one), strict=True):
            up_shape = count // one.rank, one.rank
            down, up = numbers[one.down, 0], numbers[one.up, first]
            pieces.append(LoraPiece(one.part, layer, down, down_shape, up, up_shape, scale))
            alpha_keys.append(one.alpha)
    alphas = {key: header.tensors[key] for key in alpha_keys if key}
    return LoraPlan(groups, tuple(stretch(spans)), tuple(pieces), alphas, tuple(alpha_keys))


def up_parts(one: Fitted) -> Iterator[tuple[int, int]]:
    """First number and count of what each layer has of the wide tensor of a pair."""
    first = 0
    for outputs in one.num_outputs:
        yield first, outputs * one.rank
        first += outputs * one.rank


def lay_out(
    stored: Mapping[tuple[str, int], StoredNumbers],
) -> tuple[tuple[DtypeGroup, ...], dict[tuple[str, int], int], list[FileSpan]]:
    """Groups of one dtype each, the first number of everything that is stored, and the spans that fill the block."""
    groups: list[DtypeGroup] = []
    numbers: dict[tuple[str, int], int] = {}
    spans: list[FileSpan] = []
    number = end = 0
    for dtype in dict.fromkeys(one.about.dtype for one in stored.values()):
        start = end
        for key, one in stored.items():
            if one.about.dtype == dtype:
                numbers[key] = number
                spans += one.spans(end)
                padded = -(-one.count // ALIGNMENT) * ALIGNMENT
                number, end = number + padded, end + padded * ITEM_BYTES[dtype]
        groups.append(DtypeGroup(dtype, start, end))
    return tuple(groups), numbers, spans


def stretch(spans: Sequence[FileSpan]) -> Iterator[tuple[FileSpan, ...]]:
    """Spans that follow each other in the file, a few megabytes at a time."""
    found: list[FileSpan] = []
    num_bytes = 0
    for span in sorted((span for span in spans if span.num_bytes), key=lambda span: span.first):
        is_next = bool(found) and span.first == found[-1].first + found[-1].num_bytes
        if found and not (is_next and num_bytes < STRETCH_BYTES and len(found) < MAX_PLACES):
            yield tuple(found)
            found, num_bytes = [], 0
        found.append(span)
        num_bytes += span.num_bytes
    if found:
        yield tuple(found)

"""Products of low rank, added to the output of a linear layer: what LoRAs need. Several parts of the rows, each with
other matrices, with several or with none, are served by one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

MAX_BLOCK_RANK = 64  # a higher rank is taken in pieces
NUM_PROGRAMS = 264  # that keep a large GPU busy: with fewer, the columns are dealt among several programs


@dataclass(frozen=True, eq=False)
class LowRank:
    """What is added to the weight of one layer: W becomes W + scale * up @ down."""

    down: Tensor  # [rank, inputs]; of a convolution [rank, inputs, height, width]
    up: Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def delta(self) -> Tensor:
        """What is added to the weight, in float32 [outputs, inputs, ...]"""
        product = self.up.float() @ self.down.float().flatten(1)
        return self.scale * product.view(len(self.up), *self.down.shape[1:])


class LowRankLayers:
    """The products that are added to the layers of a network, by number of the layer. Its tensors stay where they
    are."""

    def __init__(self, layers: Sequence[Sequence[LowRank]]) -> None:
        self.layers = layers
        self.max_products = max(map(len, layers), default=0)  # of a layer

    def __getitem__(self, number: int) -> Sequence[LowRank]:
        return self.layers[number]

    @cached_property
    def table(self) -> Tensor:
        """[layers, products, 4], int64: the addresses of `down` and `up`, the rank and the bits of the scale, on the
        device. A rank of 0 stands for no product."""
        table = np.zeros((len(self.layers), self.max_products, 4), dtype=np.int64)
        for number, products in enumerate(self.layers):
            for place, low in enumerate(products):
                bits = np.float32(low.scale).view(np.int32)
                table[number, place] = low.down.data_ptr(), low.up.data_ptr(), low.rank, bits
        device = next(low.down.device for products in self.layers for low in products)
        return to_device(table, device)


class RowPart(NamedTuple):
    """Consecutive rows, and what is added to their outputs."""

    first: int
    end: int
    layers: LowRankLayers


def add_low_rank(rows: Tensor, out: Tensor, parts: tuple[RowPart, ...], number: int) -> None:
    """Add scale * up @ (down @ row) to out [rows, outputs], in place, for every row [rows, inputs] of each part and all
    its products at the layer of this number. The rows of `out` need not be contiguous."""
    assert all(part.end <= len(rows) == len(out) for part in parts)
    run = add_low_rank_fused if runs_fused(out) else add_low_rank_reference
    run(rows, out, parts, number)


def add_low_rank_reference(rows: Tensor, out: Tensor, parts: tuple[RowPart, ...], number: int) -> None:
    for part in parts:
        for low in part.layers[number]:
            hidden = F.linear(rows[part.first : part.end], low.down.flatten(1))
            out[part.first : part.end].addmm_(hidden, low.up.T, alpha=low.scale)


def add_low_rank_fused(rows: Tensor, out: Tensor, parts: tuple[RowPart, ...], number: int) -> None:
    products = [low for part in parts for low in part.layers[number]]
    num_rows = max(part.end - part.first for part in parts)
    if not products or not num_rows:
        return
    assert rows.stride(1) == out.stride(1) == 1
    assert all(low.down.dtype == low.up.dtype == rows.dtype == out.dtype for low in products)
    num_outputs = out.shape[1]
    ranks = [low.rank for low in products]
    block_rows, block_outputs = 16 if num_rows <= 16 else 32, 128
    num_tiles = triton.cdiv(num_rows, block_rows)
    num_shares = min(NUM_PROGRAMS // (num_tiles * len(parts)), triton.cdiv(num_outputs, 4 * block_outputs))
    add_low_rank_kernel[(num_tiles, len(parts), max(num_shares, 1))](
        rows, out, rows.stride(0), out.stride(0), addresses_of(parts, rows.device), number, rows.shape[1], num_outputs,
        block_rows=block_rows, block_inputs=64, block_outputs=block_outputs,
        block_rank=min(max(power_of_two(max(ranks)), 16), MAX_BLOCK_RANK),
        is_aligned=all(rank % 8 == 0 for rank in ranks), num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=64)  # jobs that stay together keep their parts from step to step
def addresses_of(parts: tuple[RowPart, ...], device: torch.device) -> Tensor:
    """[parts, 4]: the first row and the end of each, the address of its table and the products per layer in it."""
    numbers = [
        (part.first, part.end, part.layers.table.data_ptr(), part.layers.max_products)
        if part.layers.max_products
        else (0, 0, 0, 0)
        for part in parts
    ]
    return to_device(np.array(numbers, dtype=np.int64), device)


def to_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy numbers to a device that does not wait for it."""
    kept = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    kept.copy_(torch.from_numpy(numbers))
    return kept.to(device, non_blocking=True)


@triton.jit(do_not_specialize=["number"])
def add_low_rank_kernel(  # type: ignore[no-untyped-def]
    rows, out, row_stride, out_stride, parts, number, num_inputs, num_outputs,
    block_rows: tl.constexpr, block_inputs: tl.constexpr, block_outputs: tl.constexpr, block_rank: tl.constexpr,
    is_aligned: tl.constexpr,
):  # fmt: skip
    """One program per tile of a part's rows and share of the columns. It multiplies its rows by `down` once, and by all
    rows of `up` in its share."""
    part = parts + 4 * tl.program_id(1)
    end = tl.load(part + 1)
    start = tl.load(part) + tl.program_id(0) * block_rows
    if start < end:
        num_products = tl.load(part + 3)
        entry = tl.load(part + 2).to(parts.dtype) + 4 * num_products * number
        row = start + tl.arange(0, block_rows).to(tl.int64)
        has_row = (row < end)[:, None]
        x = rows + row[:, None] * row_stride
        y = out + row[:, None] * out_stride
        rank_place = tl.arange(0, block_rank)
        for _ in range(0, num_products):
            down = tl.multiple_of(tl.load(entry).to(rows.dtype), 16)
            up = tl.multiple_of(tl.load(entry + 1).to(rows.dtype), 16)
            rank, scale = tl.load(entry + 2), tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
            if is_aligned:  # several values are read at once
                rank = tl.multiple_of(rank, 8)
            for first_rank in range(0, rank, block_rank):
                at = first_rank + rank_place
                hidden = tl.zeros((block_rows, block_rank), tl.float32)
                for first in range(0, num_inputs, block_inputs):
                    channel = first + tl.arange(0, block_inputs)
                    has_channel = (channel < num_inputs)[None, :]
                    value = tl.load(x + channel[None, :], mask=has_row & has_channel, other=0.0)
                    weight = tl.load(
                        down + at[:, None] * num_inputs + channel[None, :],
                        mask=(at < rank)[:, None] & has_channel, other=0.0,
                    )  # fmt: skip
                    hidden = tl.dot(value, tl.trans(weight), hidden, input_precision="ieee")
                narrow = hidden.to(rows.dtype.element_ty)
                share = tl.program_id(2) * block_outputs
                for first in range(share, num_outputs, tl.num_programs(2) * block_outputs):
                    channel = first + tl.arange(0, block_outputs)
                    has_channel = channel < num_outputs
                    weight = tl.load(
                        up + channel[:, None] * rank + at[None, :],
                        mask=has_channel[:, None] & (at < rank)[None, :], other=0.0,
                    )  # fmt: skip
                    added = scale * tl.dot(narrow, tl.trans(weight), input_precision="ieee")
                    inside = has_row & has_channel[None, :]
                    before = tl.load(y + channel[None, :], mask=inside, other=0.0).to(tl.float32)
                    tl.store(y + channel[None, :], (before + added).to(out.dtype.element_ty), mask=inside)
                tl.debug_barrier()  # the next product reads what other threads have written
            entry += 4

"""A linear layer whose weights depend on the branch of a row: what LoRAs need whose weights are copied. One product for
all branches of a batch, some of which may multiply by the layer's own weights.

A branch finds its weights through the address of a table. A captured pass is bound to the place of these addresses and
not to the weights: the next pass may have others there.
"""

from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.addresses import tensor_at
from instgenie.kernels.low_rank import MIN_BLOCK_BRANCHES, LowRankRows, find_tile
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

TILES_TOGETHER = 8  # tiles of rows whose columns are computed before others': they share weights in the cache


class Blocks(NamedTuple):
    """The part of a product that a program computes, and how."""

    rows: int
    outputs: int
    inputs: int  # that are multiplied at once
    num_warps: int
    num_stages: int


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, whose: LowRankRows, number: int) -> Tensor:
    """Multiply rows [rows, inputs] by the weights [outputs, inputs] that their branch has at the layer of this number,
    or by the given ones where it has none."""
    if runs_fused(rows):
        return launch_grouped(rows, weight, bias, whose, number)
    return grouped_linear_reference(rows, weight, bias, whose, number)


def grouped_linear_reference(
    rows: Tensor, weight: Tensor, bias: Tensor | None, whose: LowRankRows, number: int
) -> Tensor:
    assert whose.copies is not None
    splits, tables = whose.splits(len(rows)), whose.copies.tolist()
    out = rows.new_empty(len(rows), len(weight))
    for table, branches in groupby(range(len(tables)), tables.__getitem__):
        first, *others = branches
        own = slice(splits[first], splits[first + len(others) + 1])
        address = int(tensor_at(table + 8 * number, (1,), torch.int64, rows.device)) if table else 0
        found = tensor_at(address, weight.shape, weight.dtype, rows.device) if address else weight
        if own.start < own.stop:
            out[own] = F.linear(rows[own], found, bias)
    return out


def launch_grouped(
    rows: Tensor, weight: Tensor, bias: Tensor | None, whose: LowRankRows, number: int, blocks: Blocks | None = None
) -> Tensor:
    num_rows, num_branches, (num_outputs, num_inputs) = len(rows), len(whose.slots), weight.shape
    out = rows.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    assert whose.copies is not None
    assert rows.stride(1) == 1
    assert weight.is_contiguous()
    assert rows.dtype == weight.dtype
    assert whose.bounds is not None or num_branches * whose.per_branch == num_rows
    blocks = blocks or choose_blocks(num_rows // num_branches, num_outputs, rows.dtype)
    num_tiles = whose.max_tiles(num_rows, blocks.rows)
    grouped_kernel[(num_tiles * triton.cdiv(num_outputs, blocks.outputs),)](
        rows, out, out if bias is None else bias, rows.stride(0), weight,
        whose.copies, whose.copies if whose.bounds is None else whose.bounds,
        number, num_rows, num_branches, whose.per_branch, num_tiles, num_inputs, num_outputs,
        block_branches=max(power_of_two(num_branches), MIN_BLOCK_BRANCHES),
        block_rows=blocks.rows, block_outputs=blocks.outputs, block_inputs=blocks.inputs,
        tiles_together=TILES_TOGETHER, is_uniform=whose.bounds is None, has_bias=bias is not None,
        is_aligned=weight.data_ptr() % 16 == 0, are_whole=num_inputs % blocks.inputs == 0,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return out


def choose_blocks(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Blocks:
    """As large as a multiprocessor's own memory and the branches' rows allow: the larger, the less is read."""
    if dtype.itemsize > 2:
        return Blocks(32, 64, 32, num_warps=4, num_stages=2)
    if num_rows < 192:  # per branch: a tile of 128 would be half empty
        return Blocks(64, 128, 64, num_warps=4, num_stages=4)
    if num_outputs % 256:
        return Blocks(128, 128, 64, num_warps=8, num_stages=3)  # two programs fit a multiprocessor
    return Blocks(128, 256, 64, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["number", "num_rows", "num_branches", "per_branch", "num_tiles"])
def grouped_kernel(  # type: ignore[no-untyped-def]
    rows, out, bias, row_stride, weight, tables, bounds, number, num_rows, num_branches, per_branch, num_tiles,
    num_inputs, num_outputs,
    block_branches: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr,
    tiles_together: tl.constexpr, is_uniform: tl.constexpr, has_bias: tl.constexpr, is_aligned: tl.constexpr,
    are_whole: tl.constexpr,
):  # fmt: skip
    """One program per tile of a branch's rows and block of columns. Rows and columns outside are read again from
    inside, and not written."""
    num_columns = tl.cdiv(num_outputs, block_outputs)
    first_tile = tl.program_id(0) // (tiles_together * num_columns) * tiles_together
    place = tl.program_id(0) % (tiles_together * num_columns)
    num_together = tl.minimum(num_tiles - first_tile, tiles_together)
    tile = first_tile + place % num_together
    branch, start, end = find_tile(
        tile, bounds, num_rows, num_branches, per_branch, block_branches, block_rows, is_uniform
    )
    if (start < end) & (branch < num_branches):
        table = tl.load(tables + branch)
        address = tl.load(table.to(tables.dtype) + number, mask=table != 0, other=0)
        w = tl.where(address == 0, weight, address.to(weight.dtype))
        if is_aligned:  # several values are read at once
            w = tl.multiple_of(w, 16)
        row = start + tl.arange(0, block_rows).to(tl.int64)
        column = place // num_together * block_outputs + tl.arange(0, block_outputs)
        channel = tl.arange(0, block_inputs)
        x = rows + tl.minimum(row, end - 1)[:, None] * row_stride + channel[None, :]
        w += tl.minimum(column, num_outputs - 1)[None, :] * num_inputs + channel[:, None]
        total = tl.zeros((block_rows, block_outputs), tl.float32)
        for first in range(0, num_inputs, block_inputs):
            if are_whole:
                value, weights = tl.load(x), tl.load(w)
            else:
                is_there = channel < num_inputs - first
                value = tl.load(x, mask=is_there[None, :], other=0.0)
                weights = tl.load(w, mask=is_there[:, None], other=0.0)
            total = tl.dot(value, weights, total, input_precision="ieee")
            x += block_inputs
            w += block_inputs
        has_column = column < num_outputs
        if has_bias:
            total += tl.load(bias + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
        y = out + row[:, None] * num_outputs + column[None, :]
        tl.store(y, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & has_column[None, :])

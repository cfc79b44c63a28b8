"""Products of low rank, added to the outputs of linear layers: what LoRAs need. Every branch of a batch has other
products, several or none, and one launch serves all of them.

A branch finds its products through its slot, which holds the address of a table. A captured pass is bound to the place
of the slots and not to what they hold: the next pass may have other products there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from instgenie.kernels.addresses import tensor_at
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

MIN_BLOCK_RANK, MAX_BLOCK_RANK = 16, 64  # a higher rank is taken in pieces
NUM_PROGRAMS = 264  # that keep a large GPU busy: with fewer, the columns are dealt among several programs
MIN_TILES = 56  # of rows: with fewer, tiles are smaller
BLOCK_OUTPUTS = 128
MIN_BLOCK_BRANCHES = 32  # so that batches of most sizes share compiled kernels


@dataclass(frozen=True, eq=False)
class LowRank:
    """What is added to the weight of one layer: W becomes W + scale * up @ down."""

    down: Tensor  # [rank, inputs]; of a convolution [rank, inputs, height, width]
    up: Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.size(0)

    @cached_property
    def entry(self) -> tuple[int, int, int]:
        """Where the tensors are, and the rank."""
        return self.down.data_ptr(), self.up.data_ptr(), self.rank

    def scaled(self, scale: float) -> "LowRank":
        """The same product with another scale. Its tensors are where they were."""
        if scale == 1:
            return self
        scaled = LowRank(self.down, self.up, self.scale * scale)
        vars(scaled)["entry"] = self.entry
        return scaled

    @property
    def delta(self) -> Tensor:
        """What is added to the weight, in float32 [outputs, inputs, ...]"""
        product = self.up.float() @ self.down.float().flatten(1)
        return self.scale * product.view(len(self.up), *self.down.shape[1:])


class RankClass(NamedTuple):
    """What a kernel must know of ranks before it is launched. Products of one class are exchanged freely."""

    block: int = MIN_BLOCK_RANK  # of a rank that is multiplied at once
    is_aligned: bool = True  # all ranks are multiples of 8

    @classmethod
    def of(cls, ranks: Collection[int]) -> "RankClass":
        block = min(max(power_of_two(max(ranks, default=1)), MIN_BLOCK_RANK), MAX_BLOCK_RANK)
        return cls(block, all(rank % 8 == 0 for rank in ranks))

    @classmethod
    def join(cls, classes: "Sequence[RankClass]") -> "RankClass":
        return cls(max(one.block for one in classes), all(one.is_aligned for one in classes))


class LowRankLayers:
    """The products that are added to the layers of a network, by number of the layer. Its tensors stay where they
    are."""

    def __init__(self, layers: Sequence[Sequence[LowRank]]) -> None:
        self.layers = layers
        self.max_products = max(map(len, layers), default=0)  # of a layer
        self.patched = frozenset(number for number, products in enumerate(layers) if products)
        self.rank_class = RankClass.of({low.entry[2] for products in layers for low in products})

    @cached_property
    def table(self) -> Tensor:
        """[layers, products, 4], int64: the addresses of `down` and `up`, the rank and the bits of the scale, on the
        device. A rank of 0 stands for no product."""
        table = np.zeros((len(self.layers), self.max_products, 4), dtype=np.int64)
        placed = [(number, place) for number, own in enumerate(self.layers) for place in range(len(own))]
        lows = [low for products in self.layers for low in products]
        numbers, places = np.array(placed).T
        table[numbers, places, :3] = [low.entry for low in lows]
        table[numbers, places, 3] = np.array([low.scale for low in lows], dtype=np.float32).view(np.int32)
        return to_device(table, lows[0].down.device)

    @property
    def slot(self) -> tuple[int, int]:
        """The address of the table, and the products per layer in it."""
        return (self.table.data_ptr(), self.max_products) if self.patched else (0, 0)


class LowRankRows(NamedTuple):
    """Rows of several branches, which lie one behind the other, and where the products of each branch are found."""

    slots: Tensor  # [branches, 2], int64: see `LowRankLayers.slot`; zeros for a branch without products
    rank_class: RankClass
    per_branch: int  # rows of each branch, if `bounds` is None
    bounds: Tensor | None  # [branches + 1], between the rows of the branches; rows behind are the last branch's
    copies: Tensor | None = None  # [branches], int64: addresses of tables of weights; 0 for the layers' own

    def max_tiles(self, num_rows: int, block_rows: int) -> int:
        """Tiles of so many rows that hold rows of one branch each: no fewer than there are."""
        if self.bounds is None:
            return len(self.slots) * triton.cdiv(self.per_branch, block_rows)  # type: ignore[no-any-return]
        return triton.cdiv(num_rows, block_rows) + len(self.slots)  # type: ignore[no-any-return]

    def splits(self, num_rows: int) -> list[int]:
        """As `bounds`; waits for the device."""
        even = [self.per_branch * branch for branch in range(len(self.slots))]
        return [*(even if self.bounds is None else self.bounds.tolist()[:-1]), num_rows]


def add_up(weight: Tensor, lows: Sequence[LowRank]) -> Tensor:
    """The weight with products added to it, in float32."""
    return weight.float() + sum(low.delta.view(weight.shape) for low in lows)


def make_slots(products: Sequence[LowRankLayers | None], device: torch.device) -> Tensor:  # [branches, 2]
    return to_device(np.array([one.slot if one else (0, 0) for one in products], dtype=np.int64), device)


def add_low_rank(rows: Tensor, out: Tensor, whose: LowRankRows, number: int) -> None:
    """Add scale * up @ (down @ row) to out [rows, outputs], in place, for every row [rows, inputs] and all products of
    its branch at the layer of this number. The rows of `out` need not be contiguous."""
    if runs_fused(out):
        launch(rows, out, whose, (number,), (out.shape[1],), None, writes=False)
    else:
        add_low_rank_reference(rows, out, whose, number)


def start_low_rank(
    rows: Tensor, whose: LowRankRows, numbers: Sequence[int], widths: Sequence[int], bias: Tensor | None
) -> Tensor:
    """The outputs of several layers side by side, as far as they do not come from the layers' weights: the bias and the
    products of low rank. The product with the weights is added to it. To write first and add then moves less memory
    than to add to what is written. Needs kernels."""
    out = rows.new_empty(len(rows), sum(widths))
    launch(rows, out, whose, tuple(numbers), tuple(widths), bias, writes=True)
    return out


def add_low_rank_reference(rows: Tensor, out: Tensor, whose: LowRankRows, number: int) -> None:
    splits, slots = whose.splits(len(rows)), whose.slots.tolist()
    for (address, num_products), branches in groupby(range(len(slots)), slots.__getitem__):
        first, *others = branches
        own = slice(splits[first], splits[first + len(others) + 1])
        start = address + 4 * 8 * num_products * number
        table = tensor_at(start, (num_products, 4), torch.int64, rows.device)
        for down, up, rank, bits in table.tolist() if own.start < own.stop else ():
            if rank:
                hidden = F.linear(rows[own], tensor_at(down, (rank, rows.shape[1]), rows.dtype, rows.device))
                wide = tensor_at(up, (out.shape[1], rank), rows.dtype, rows.device)
                out[own].addmm_(hidden, wide.T, alpha=float(np.int32(bits).view(np.float32)))


def launch(
    rows: Tensor,
    out: Tensor,
    whose: LowRankRows,
    numbers: tuple[int, ...],
    widths: tuple[int, ...],
    bias: Tensor | None,
    writes: bool,
) -> None:
    num_rows, num_branches = len(rows), len(whose.slots)
    if not num_rows:
        return
    assert rows.stride(1) == out.stride(1) == 1
    assert rows.dtype == out.dtype
    assert whose.bounds is not None or num_branches * whose.per_branch == num_rows == len(out)
    block_rows = choose_block_rows(num_rows, num_branches, rows.dtype)
    num_tiles = whose.max_tiles(num_rows, block_rows)
    num_shares = min(NUM_PROGRAMS // (num_tiles * len(numbers)), triton.cdiv(max(widths), 4 * BLOCK_OUTPUTS))
    low_rank_kernel[(len(numbers), num_tiles, max(num_shares, 1))](  # layers that read the same rows run together
        rows, out, out if bias is None else bias, rows.stride(0), out.stride(0),
        whose.slots, whose.slots if whose.bounds is None else whose.bounds, layers_at(numbers, widths, rows.device),
        num_rows, num_branches, whose.per_branch, int(bias is not None), rows.shape[1],
        block_branches=max(power_of_two(num_branches), MIN_BLOCK_BRANCHES), block_rows=block_rows,
        block_inputs=choose_block_inputs(whose.rank_class, rows.dtype), block_outputs=BLOCK_OUTPUTS,
        block_rank=whose.rank_class.block, is_aligned=whose.rank_class.is_aligned,
        are_wide=all(width % 16 == 0 for width in widths), is_uniform=whose.bounds is None, writes=writes,
        num_warps=4,
    )  # fmt: skip


def choose_block_rows(num_rows: int, num_branches: int, dtype: torch.dtype) -> int:
    """As many rows as leave enough tiles, since every tile reads all products of its branch. Tiles hold rows of one
    branch."""
    most = 64 if dtype.itemsize == 2 else 32  # fit a multiprocessor's own memory
    wanted = min(num_rows // MIN_TILES, num_rows // num_branches, most)
    return max(1 << max(wanted, 1).bit_length() - 1, 16)


def choose_block_inputs(rank_class: RankClass, dtype: torch.dtype) -> int:
    """As many as fit a multiprocessor's own memory three times: two loads are under way while one is multiplied."""
    return 128 if rank_class.block <= 32 and dtype.itemsize == 2 else 64


@cache  # a model has as many as it has layers: captured passes read them where they are
def layers_at(numbers: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[layers, 3]: the number of each, its first column and how many it has."""
    firsts = np.cumsum((0, *widths[:-1]))
    return to_device(np.stack([numbers, firsts, widths], axis=1).astype(np.int64), device)


def to_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy numbers to a device that does not wait for it."""
    kept = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    kept.copy_(torch.from_numpy(numbers))
    return kept.to(device, non_blocking=True)


@triton.jit()
def find_tile(  # type: ignore[no-untyped-def]
    tile, bounds, num_rows, num_branches, per_branch,
    block_branches: tl.constexpr, block_rows: tl.constexpr, is_uniform: tl.constexpr,
):  # fmt: skip
    """The branch of a tile of rows, its first row and the end of the branch. A tile behind the last has no rows, or no
    branch."""
    if is_uniform:
        num_each = tl.cdiv(per_branch, block_rows)
        branch = (tile // num_each).to(tl.int64)
        start = branch * per_branch + (tile % num_each) * block_rows
        end = (branch + 1) * per_branch
    else:
        place = tl.arange(0, block_branches)
        is_branch = place < num_branches
        firsts = tl.load(bounds + place, mask=is_branch, other=0).to(tl.int64)
        ends = tl.load(bounds + place + 1, mask=is_branch, other=0).to(tl.int64)
        ends = tl.where(place == num_branches - 1, num_rows, ends)
        num_tiles = (ends - firsts + block_rows - 1) // block_rows
        last_tiles = tl.cumsum(num_tiles, 0)
        branch = tl.sum((is_branch & (last_tiles <= tile)).to(tl.int64), 0)
        is_own = place == branch
        start = tl.sum(tl.where(is_own, firsts + (tile - last_tiles + num_tiles) * block_rows, 0), 0)
        end = tl.sum(tl.where(is_own, ends, 0), 0)
    return branch, start, end


@triton.jit(do_not_specialize=["num_rows", "num_branches", "per_branch", "has_bias"])
def low_rank_kernel(  # type: ignore[no-untyped-def]
    rows, out, bias, row_stride, out_stride, slots, bounds, layers, num_rows, num_branches, per_branch, has_bias,
    num_inputs,
    block_branches: tl.constexpr, block_rows: tl.constexpr, block_inputs: tl.constexpr, block_outputs: tl.constexpr,
    block_rank: tl.constexpr, is_aligned: tl.constexpr, are_wide: tl.constexpr, is_uniform: tl.constexpr,
    writes: tl.constexpr,
):  # fmt: skip
    """One program per tile of a branch's rows, layer and share of its columns. It multiplies its rows by `down` once,
    and by all rows of `up` in its share. It adds to `out`, or writes it."""
    branch, start, end = find_tile(
        tl.program_id(1), bounds, num_rows, num_branches, per_branch, block_branches, block_rows, is_uniform
    )
    if (start < end) & (branch < num_branches):
        layer = layers + 3 * tl.program_id(0)
        number, first_column, num_outputs = tl.load(layer), tl.load(layer + 1), tl.load(layer + 2)
        if are_wide:  # several values are written at once
            first_column, num_outputs = tl.multiple_of(first_column, 16), tl.multiple_of(num_outputs, 16)
        num_products = tl.load(slots + 2 * branch + 1)
        entry = tl.load(slots + 2 * branch).to(slots.dtype) + 4 * num_products * number
        row = start + tl.arange(0, block_rows).to(tl.int64)
        has_row = (row < end)[:, None]
        x = rows + row[:, None] * row_stride
        y = out + row[:, None] * out_stride + first_column
        rank_place = tl.arange(0, block_rank)
        share, stride = tl.program_id(2) * block_outputs, tl.num_programs(2) * block_outputs
        num_biases = num_outputs * has_bias
        bias_scale = 1.0  # 0 once it is there
        is_there = (row < 0)[:, None] if writes else has_row  # False before anything is written
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
                for first in range(share, num_outputs, stride):
                    channel = first + tl.arange(0, block_outputs)
                    has_channel = channel < num_outputs
                    inside = has_row & has_channel[None, :]
                    weight = tl.load(
                        up + channel[:, None] * rank + at[None, :],
                        mask=has_channel[:, None] & (at < rank)[None, :], other=0.0,
                    )  # fmt: skip
                    added = scale * tl.dot(narrow, tl.trans(weight), input_precision="ieee")
                    before = tl.load(y + channel[None, :], mask=is_there & has_channel[None, :], other=0.0)
                    added += before.to(tl.float32)
                    if writes:
                        own = tl.load(bias + first_column + channel, mask=channel < num_biases, other=0.0)
                        added += bias_scale * own.to(tl.float32)[None, :]
                    tl.store(y + channel[None, :], added.to(out.dtype.element_ty), mask=inside)
                bias_scale = 0.0
                is_there = has_row
                tl.debug_barrier()  # the next product reads what other threads have written
            entry += 4
        if writes and bias_scale > 0:
            for first in range(share, num_outputs, stride):
                channel = first + tl.arange(0, block_outputs)
                has_channel = channel < num_outputs
                alone = tl.zeros((block_rows, block_outputs), out.dtype.element_ty)
                alone += tl.load(bias + first_column + channel, mask=channel < num_biases, other=0.0)
                tl.store(y + channel[None, :], alone, mask=has_row & has_channel[None, :])

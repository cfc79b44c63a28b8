"""Weights with products of low rank added to them, written elsewhere: one launch for all layers of a network."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from instgenie.kernels.low_rank import LowRankLayers, add_up, to_device
from instgenie.kernels.switch import runs_fused, tl, triton

BLOCK_ROWS, BLOCK_COLUMNS = 64, 128  # of a weight


def merge_weights(
    weights: Sequence[Tensor],
    memory: Tensor,
    places: Sequence[int],
    products: LowRankLayers,
    numbers: Sequence[int],
) -> None:
    """Write each weight [outputs, inputs], with the products of the layer of its number added in float32 and rounded
    once, to its place in a block of memory [bytes]."""
    lows = [low for own in products.layers for low in own]
    dtypes = {tensor.dtype for tensor in (*weights, *(low.down for low in lows), *(low.up for low in lows))}
    if weights and len(dtypes) == 1 and runs_fused(weights[0]):
        launch_merge(weights, memory, places, products, numbers)
    else:
        merge_weights_reference(weights, memory, places, products, numbers)


def merge_weights_reference(
    weights: Sequence[Tensor],
    memory: Tensor,
    places: Sequence[int],
    products: LowRankLayers,
    numbers: Sequence[int],
) -> None:
    for weight, place, number in zip(weights, places, numbers, strict=True):
        lows = products.layers[number]
        view_at(memory, place, weight).copy_(add_up(weight, lows) if lows else weight)


def view_at(memory: Tensor, place: int, like: Tensor) -> Tensor:
    """A tensor of the same dtype and shape in a block of memory."""
    return memory[place : place + like.nbytes].view(like.dtype).view(like.shape)


def launch_merge(
    weights: Sequence[Tensor],
    memory: Tensor,
    places: Sequence[int],
    products: LowRankLayers,
    numbers: Sequence[int],
) -> None:
    shapes = np.array([weight.shape for weight in weights], dtype=np.int64)
    num_tiles = (-(-shapes // (BLOCK_ROWS, BLOCK_COLUMNS))).prod(axis=1)
    addresses = np.array([weight.data_ptr() for weight in weights]), np.array(places) + memory.data_ptr()
    layers = np.column_stack([*addresses, numbers, shapes, num_tiles.cumsum() - num_tiles]).astype(np.int64)
    owners = to_device(np.arange(len(weights)).repeat(num_tiles), memory.device)
    merge_kernel[(len(owners),)](
        memory.view(weights[0].dtype), products.table, to_device(layers, memory.device), owners, products.max_products,
        block_rows=BLOCK_ROWS, block_columns=BLOCK_COLUMNS, block_rank=products.rank_class.block,
        is_aligned=products.rank_class.is_aligned,
        are_wide=not any((numbers % 16).any() for numbers in (*addresses, shapes[:, 1])), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_products"])
def merge_kernel(  # type: ignore[no-untyped-def]
    merged, products, layers, owners, num_products,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_rank: tl.constexpr, is_aligned: tl.constexpr,
    are_wide: tl.constexpr,
):  # fmt: skip
    """One program per tile of a weight."""
    layer = layers + 6 * tl.load(owners + tl.program_id(0))
    weight, place = tl.load(layer).to(merged.dtype), tl.load(layer + 1).to(merged.dtype)
    number, num_outputs = tl.load(layer + 2), tl.load(layer + 3).to(tl.int32)
    num_inputs = tl.load(layer + 4).to(tl.int32)
    if are_wide:  # several values are read and written at once
        weight, place, num_inputs = (
            tl.multiple_of(weight, 16),
            tl.multiple_of(place, 16),
            tl.multiple_of(num_inputs, 16),
        )
    tile = tl.program_id(0) - tl.load(layer + 5).to(tl.int32)
    num_columns = tl.cdiv(num_inputs, block_columns)
    row = tile // num_columns * block_rows + tl.arange(0, block_rows)
    column = tile % num_columns * block_columns + tl.arange(0, block_columns)
    has_row, has_column = (row < num_outputs)[:, None], (column < num_inputs)[None, :]
    at = row[:, None] * num_inputs + column[None, :]
    total = tl.load(weight + at, mask=has_row & has_column, other=0.0).to(tl.float32)
    entry = products + 4 * num_products * number
    for _ in range(0, num_products):
        down = tl.multiple_of(tl.load(entry).to(merged.dtype), 16)
        up = tl.multiple_of(tl.load(entry + 1).to(merged.dtype), 16)
        rank, bits = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        if is_aligned:
            rank = tl.multiple_of(rank, 8)
        added = tl.zeros((block_rows, block_columns), tl.float32)
        for first in range(0, rank, block_rank):
            place_in_rank = first + tl.arange(0, block_rank)
            has_rank = place_in_rank < rank
            wide = tl.load(
                up + row[:, None] * rank + place_in_rank[None, :], mask=has_row & has_rank[None, :], other=0.0
            )
            narrow = tl.load(
                down + place_in_rank[:, None] * num_inputs + column[None, :],
                mask=has_rank[:, None] & has_column, other=0.0,
            )  # fmt: skip
            added = tl.dot(wide, narrow, added, input_precision="ieee")
        total += bits.to(tl.float32, bitcast=True) * added
        entry += 4
    tl.store(place + at, total.to(merged.dtype.element_ty), mask=has_row & has_column)

"""Group norm of pictures in channels-last memory, fused with its neighbours: a vector added to every token of a picture
before it, and after it SiLU and the selection of the tokens that flow on. Statistics are per picture.

Three kernels: the first sums each channel over pieces of a picture; the second makes a scale and a shift per channel
from the sums; the third applies them. Sums are of differences from the picture's first token, so that no large values
cancel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

BLOCK_TOKENS, BLOCK_CHANNELS = 32, 64
NUM_PIECES = 64  # a picture is summed in at most so many pieces, unless they exceed MAX_PIECE
MAX_PIECE = 2048  # tokens


def group_norm(
    x: Tensor, norm: nn.GroupNorm, added: Tensor | None = None, activates: bool = False, index: Tensor | None = None
) -> Tensor:
    """Group norm of x [pictures, channels, rows, columns] with channels last in memory, after `added` [pictures,
    channels] is added to each token, and followed by SiLU if it activates. With an index into the tokens of all
    pictures in sequence, only those tokens are returned: [tokens, channels]."""
    run = group_norm_fused if runs_fused(x) else group_norm_reference
    return run(x, norm, added, activates, index)


def group_norm_reference(
    x: Tensor, norm: nn.GroupNorm, added: Tensor | None, activates: bool, index: Tensor | None
) -> Tensor:
    x = x if added is None else x + added[:, :, None, None]
    normed = F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    normed = F.silu(normed) if activates else normed
    return normed if index is None else normed.permute(0, 2, 3, 1).flatten(0, 2)[index]


def group_norm_fused(
    x: Tensor, norm: nn.GroupNorm, added: Tensor | None, activates: bool, index: Tensor | None
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    num_pictures, num_channels, num_rows, num_columns = x.shape
    num_tokens, num_blocks = num_rows * num_columns, -(-num_channels // BLOCK_CHANNELS)
    piece = min(max(power_of_two(-(-num_tokens // NUM_PIECES)), BLOCK_TOKENS), MAX_PIECE)  # each is compiled
    num_pieces = -(-num_tokens // piece)
    added = added.contiguous() if added is not None else None
    assert added is None or added.shape == (num_pictures, num_channels)
    sums = torch.empty(num_pictures, num_pieces, 2, num_channels, device=x.device, dtype=torch.float32)
    columns = torch.empty(num_pictures, 2, num_channels, device=x.device, dtype=torch.float32)
    sum_kernel[(num_pieces, num_blocks, num_pictures)](
        x,
        sums,
        num_tokens,
        num_channels,
        piece=piece,
        block_tokens=BLOCK_TOKENS,
        block_channels=BLOCK_CHANNELS,
        num_warps=4,
    )
    group = num_channels // norm.num_groups
    column_kernel[(norm.num_groups, num_pictures)](
        x, sums, norm.weight, norm.bias, x if added is None else added, columns, num_tokens, num_pieces, num_channels,
        norm.eps, group=group, block_pieces=power_of_two(num_pieces), block_group=power_of_two(group),
        has_added=added is not None, num_warps=4,
    )  # fmt: skip
    if index is None:
        out, num_chosen, grid_pictures = torch.empty_like(x), num_tokens, num_pictures
    else:
        out, num_chosen, grid_pictures = x.new_empty(len(index), num_channels), len(index), 1
    if num_chosen:
        apply_kernel[(-(-num_chosen // BLOCK_TOKENS), num_blocks, grid_pictures)](
            x, columns, out, x if index is None else index, num_tokens, num_chosen, num_channels,
            block_tokens=BLOCK_TOKENS, block_channels=BLOCK_CHANNELS, activates=activates, has_index=index is not None,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit()
def sum_kernel(  # type: ignore[no-untyped-def]
    x, sums, num_tokens, num_channels, piece: tl.constexpr, block_tokens: tl.constexpr, block_channels: tl.constexpr
):
    """One program per piece of a picture and block of channels: sums of differences and of their squares."""
    at, picture = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    inside = channel < num_channels
    x += picture * num_tokens * num_channels
    pivot = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((block_tokens, block_channels), tl.float32)
    squares = tl.zeros((block_tokens, block_channels), tl.float32)
    end = tl.minimum((at + 1) * piece, num_tokens)
    for start in range(0, piece, block_tokens):
        token = at * piece + start + tl.arange(0, block_tokens)
        here = (token < end)[:, None] & inside[None, :]
        value = tl.load(x + token.to(tl.int64)[:, None] * num_channels + channel[None, :], mask=here, other=0.0)
        distance = tl.where(here, value.to(tl.float32) - pivot[None, :], 0.0)
        total += distance
        squares += distance * distance
    sums += (picture * tl.num_programs(0) + at) * 2 * num_channels
    tl.store(sums + channel, tl.sum(total, axis=0), mask=inside)
    tl.store(sums + num_channels + channel, tl.sum(squares, axis=0), mask=inside)


@triton.jit()
def column_kernel(  # type: ignore[no-untyped-def]
    x, sums, weight, bias, added, columns, num_tokens, num_pieces, num_channels, eps,
    group: tl.constexpr, block_pieces: tl.constexpr, block_group: tl.constexpr, has_added: tl.constexpr,
):  # fmt: skip
    """One program per group of a picture."""
    picture = tl.program_id(1).to(tl.int64)
    within = tl.arange(0, block_group)
    inside = within < group
    channel = tl.program_id(0) * group + within
    piece = tl.arange(0, block_pieces)
    places = (picture * num_pieces + piece[:, None]) * 2 * num_channels + channel[None, :]
    here = (piece < num_pieces)[:, None] & inside[None, :]
    total = tl.sum(tl.load(sums + places, mask=here, other=0.0), axis=0)
    squares = tl.sum(tl.load(sums + num_channels + places, mask=here, other=0.0), axis=0)
    pivot = tl.load(x + picture * num_tokens * num_channels + channel, mask=inside, other=0.0).to(tl.float32)
    offset = tl.zeros((block_group,), tl.float32)
    if has_added:
        offset = tl.load(added + picture * num_channels + channel, mask=inside, other=0.0).to(tl.float32)
    means = tl.where(inside, total / num_tokens + pivot + offset, 0.0)
    mean = tl.sum(means) / group
    apart = tl.where(inside, means - mean, 0.0)
    spread = tl.sum(squares - total * total / num_tokens) + num_tokens * tl.sum(apart * apart)
    factor = tl.rsqrt(spread / (num_tokens * group) + eps)
    scale = factor * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) + (offset - mean) * scale
    columns += picture * 2 * num_channels
    tl.store(columns + channel, scale, mask=inside)
    tl.store(columns + num_channels + channel, shift, mask=inside)


@triton.jit()
def apply_kernel(  # type: ignore[no-untyped-def]
    x, columns, out, index, num_tokens, num_chosen, num_channels,
    block_tokens: tl.constexpr, block_channels: tl.constexpr, activates: tl.constexpr, has_index: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens and block of channels."""
    row = (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * block_channels + tl.arange(0, block_channels))[None, :]
    chosen = row < num_chosen
    inside = chosen & (channel < num_channels)
    picture = tl.program_id(2).to(tl.int64)
    to = picture * num_tokens + row
    token = to
    of = columns + picture * 2 * num_channels + channel
    in_columns = channel < num_channels
    if has_index:
        token = tl.load(index + row, mask=chosen, other=0)
        of = columns + token // num_tokens * 2 * num_channels + channel
        in_columns = inside
    scale = tl.load(of, mask=in_columns, other=0.0)
    shift = tl.load(of + num_channels, mask=in_columns, other=0.0)
    value = tl.load(x + token * num_channels + channel, mask=inside, other=0.0).to(tl.float32)
    value = value * scale + shift
    if activates:
        value = value * tl.sigmoid(value)
    tl.store(out + to * num_channels + channel, value, mask=inside)

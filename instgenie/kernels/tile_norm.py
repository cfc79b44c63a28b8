"""Group norm of pictures that are cut into tiles. Statistics are per picture, from the moments of its tiles.

The moments of a tile are, per group of channels, the mean and the sum of squared distances from it: large values do not
cancel when they are combined. Tiles that are not computed take part with the moments that activations keep of them.
"""

import torch
from torch import Tensor, nn

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


def tile_moments(tiles: Tensor, num_groups: int, owners: Tensor, inside: Tensor, added: Tensor | None = None) -> Tensor:
    """The moments [tiles, 2 * groups] of tiles [tiles, tokens, channels], in float32: all means, then all sums. Tokens
    that are not inside [tiles, tokens] do not count. `added` [pictures, channels] is added to the tokens first, to
    each tile that of its owner, by `owners` [tiles]."""
    run = tile_moments_fused if runs_fused(tiles) else tile_moments_reference
    return run(tiles, num_groups, owners, inside, added)


def tile_moments_reference(
    tiles: Tensor, num_groups: int, owners: Tensor, inside: Tensor, added: Tensor | None
) -> Tensor:
    dtype = torch.promote_types(tiles.dtype, torch.float32)
    values = tiles.to(dtype)
    values = values if added is None else values + added.to(dtype)[owners][:, None]
    grouped = values.unflatten(2, (num_groups, -1))  # [tiles, tokens, groups, group]
    shares = inside.to(dtype) / (inside.sum(1, keepdim=True).clamp(min=1) * grouped.shape[3])
    means = torch.einsum("tngc,tn->tg", grouped, shares)
    distances = grouped - means[:, None, :, None]
    squares = torch.einsum("tngc,tngc,tn->tg", distances, distances, inside.to(dtype))
    return torch.cat([means, squares], dim=1)


def tile_moments_fused(tiles: Tensor, num_groups: int, owners: Tensor, inside: Tensor, added: Tensor | None) -> Tensor:
    tiles = tiles.contiguous()
    num_tiles, num_tokens, num_channels = tiles.shape
    group = num_channels // num_groups
    out = torch.empty(num_tiles, 2 * num_groups, device=tiles.device, dtype=torch.float32)
    added = added.contiguous() if added is not None else None
    moments_kernel[(num_tiles, num_groups)](
        tiles, owners, inside.contiguous(), tiles if added is None else added, out, num_tokens, num_channels,
        group=group, block_tokens=power_of_two(num_tokens), block_group=power_of_two(group),
        has_added=added is not None, num_warps=4,
    )  # fmt: skip
    return out


def tile_columns(moments: Tensor, counts: Tensor, norm: nn.GroupNorm, added: Tensor | None = None) -> Tensor:
    """What a norm does to each channel of a picture [pictures, 2, channels], a scale and a shift, from the moments of
    its tiles [pictures, tiles, 2 * groups], of which each has `counts` [pictures, tiles] tokens. `added` is as for the
    moments, which include it; the columns are for tokens without it."""
    run = tile_columns_fused if runs_fused(moments) else tile_columns_reference
    return run(moments, counts, norm, added)


def tile_columns_reference(moments: Tensor, counts: Tensor, norm: nn.GroupNorm, added: Tensor | None) -> Tensor:
    means, squares = moments.chunk(2, dim=2)  # [pictures, tiles, groups]
    group = norm.num_channels // norm.num_groups
    num_tokens = counts.to(moments.dtype)[:, :, None]
    num_all = num_tokens.sum(1)  # [pictures, 1]
    mean = (means * num_tokens).sum(1) / num_all
    spread = squares.sum(1) + group * (num_tokens * (means - mean[:, None]) ** 2).sum(1)
    factor = (spread / (num_all * group) + norm.eps).rsqrt()
    mean, factor = (one.repeat_interleave(group, dim=1) for one in (mean, factor))
    scale = factor * norm.weight
    offset = -mean if added is None else added - mean
    return torch.stack([scale, norm.bias + offset * scale], dim=1)


def tile_columns_fused(moments: Tensor, counts: Tensor, norm: nn.GroupNorm, added: Tensor | None) -> Tensor:
    num_pictures, num_tiles, _ = moments.shape
    num_channels = norm.num_channels
    group = num_channels // norm.num_groups
    out = torch.empty(num_pictures, 2, num_channels, device=moments.device, dtype=torch.float32)
    added = added.contiguous() if added is not None else None
    columns_kernel[(norm.num_groups, num_pictures)](
        moments.contiguous(), counts.contiguous(), norm.weight, norm.bias, moments if added is None else added, out,
        num_tiles, num_channels, norm.eps,
        group=group, num_groups=norm.num_groups, block_tiles=power_of_two(num_tiles), block_group=power_of_two(group),
        has_added=added is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit()
def moments_kernel(  # type: ignore[no-untyped-def]
    tiles, owners, inside, added, out, num_tokens, num_channels,
    group: tl.constexpr, block_tokens: tl.constexpr, block_group: tl.constexpr, has_added: tl.constexpr,
):  # fmt: skip
    """One program per group of a tile."""
    tile, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.arange(0, block_tokens)
    within = tl.arange(0, block_group)
    channel = number * group + within
    listed = token < num_tokens
    counted = tl.load(inside + tile * num_tokens + token, mask=listed, other=0) != 0
    here = (listed & counted)[:, None] & (within < group)[None, :]
    at = (tile * num_tokens + token[:, None]) * num_channels + channel[None, :]
    value = tl.load(tiles + at, mask=here, other=0.0).to(tl.float32)
    if has_added:
        picture = tl.load(owners + tile)
        offset = tl.load(added + picture * num_channels + channel, mask=within < group, other=0.0)
        value += offset.to(tl.float32)[None, :]
    value = tl.where(here, value, 0.0)
    num = tl.maximum(tl.sum((listed & counted).to(tl.float32)), 1.0) * group
    mean = tl.sum(value) / num
    distance = tl.where(here, value - mean, 0.0)
    num_groups = num_channels // group
    tl.store(out + tile * 2 * num_groups + number, mean)
    tl.store(out + tile * 2 * num_groups + num_groups + number, tl.sum(distance * distance))


@triton.jit()
def columns_kernel(  # type: ignore[no-untyped-def]
    moments, counts, weight, bias, added, out, num_tiles, num_channels, eps,
    group: tl.constexpr, num_groups: tl.constexpr, block_tiles: tl.constexpr, block_group: tl.constexpr,
    has_added: tl.constexpr,
):  # fmt: skip
    """One program per group of a picture."""
    number, picture = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, block_tiles)
    listed = tile < num_tiles
    at = moments + (picture * num_tiles + tile) * 2 * num_groups + number
    means = tl.load(at, mask=listed, other=0.0)
    squares = tl.load(at + num_groups, mask=listed, other=0.0)
    num = tl.load(counts + picture * num_tiles + tile, mask=listed, other=0.0)
    num_all = tl.sum(num)
    mean = tl.sum(means * num) / num_all
    apart = means - mean
    spread = tl.sum(squares) + group * tl.sum(num * apart * apart)
    factor = tl.rsqrt(spread / (num_all * group) + eps)
    within = tl.arange(0, block_group)
    channel, here = number * group + within, within < group
    scale = factor * tl.load(weight + channel, mask=here, other=0.0).to(tl.float32)
    offset = tl.zeros((block_group,), tl.float32) - mean
    if has_added:
        offset += tl.load(added + picture * num_channels + channel, mask=here, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=here, other=0.0).to(tl.float32) + offset * scale
    tl.store(out + picture * 2 * num_channels + channel, scale, mask=here)
    tl.store(out + picture * 2 * num_channels + num_channels + channel, shift, mask=here)

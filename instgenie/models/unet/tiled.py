"""UNets over tiles: the pass of `network` for pictures of any sizes, of which some compute the masked tiles alone.

Convolutions see the tiles of all pictures in one list, each with what lies around it: tokens of other tiles,
activations where tiles are not computed, zeros over the edge. Norms have the statistics of whole pictures. Transformers
see the pictures of each size apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from instgenie.cost.network import KeptRows
from instgenie.jobs.tiles import covers_several, side_at
from instgenie.jobs.tokens import concat
from instgenie.kernels.add import add_bias
from instgenie.kernels.addresses import Addresses, RowSources
from instgenie.kernels.take import FIRST_KEPT, NOTHING, take_rows
from instgenie.kernels.tile_norm import tile_columns, tile_moments
from instgenie.models.layers.linear import EACH_BRANCH, linear
from instgenie.models.layers.resnet import go_around, is_plain
from instgenie.models.unet.batch import Positions, UnetBatch
from instgenie.models.unet.flow import FlowPart, Pass, flow, split
from instgenie.models.unet.flow import rows_of as rows_of_branch
from instgenie.models.unet.layout import LevelLayout
from instgenie.models.unet.network import UnetBlock, embed_time, pairs, with_sides
from instgenie.models.unet.tiled_batch import TiledBatch
from instgenie.models.unet.tiles import PartRange, TileLevel, find_rows


class KeptPlace(NamedTuple):
    """What activations keep of a convolution, its input, or of a norm, the moments of the tiles of its input."""

    module: nn.GroupNorm | nn.Conv2d
    side: int  # of the level of its input
    halves: bool = False  # True for a convolution that leads to the next coarser level

    @property
    def width(self) -> int:
        """The width of a row."""
        return 2 * self.module.num_groups if isinstance(self.module, nn.GroupNorm) else self.module.in_channels

    def rows(self, tile: int) -> KeptRows:
        """What has a row, where tiles have this side at the finest level."""
        if isinstance(self.module, nn.GroupNorm):
            return "tiles"
        several = self.halves and covers_several(side_at(tile, 2 * self.side), side_at(tile, self.side))
        return "all" if several else "border"


KeptPlaces: TypeAlias = dict[nn.Module, int]  # numbers among what activations keep


def walk_places(unet: UNet2DConditionModel) -> Iterator[KeptPlace | Transformer2DModel]:
    """What reads activations, in the order of a pass over masked tiles."""
    for block, side in with_sides(unet):
        attentions = list(getattr(block, "attentions", None) or ())
        for number, resnet in enumerate(block.resnets):
            for module in (resnet.norm1, resnet.conv1, resnet.norm2, resnet.conv2):
                yield KeptPlace(module, side)
            if number < len(attentions):
                yield KeptPlace(attentions[number].norm, side)
                yield attentions[number]
        for sampler in getattr(block, "downsamplers", None) or ():
            yield KeptPlace(sampler.conv, side, halves=True)
        for sampler in getattr(block, "upsamplers", None) or ():
            yield KeptPlace(sampler.conv, side)
    yield KeptPlace(unet.conv_norm_out, 1)
    yield KeptPlace(unet.conv_out, 1)


def find_kept(unet: UNet2DConditionModel) -> list[KeptPlace]:
    """What activations keep for convolutions, after all that they keep for transformers."""
    return [place for place in walk_places(unet) if isinstance(place, KeptPlace)]


def can_tile(unet: UNet2DConditionModel) -> bool:
    """True for UNets as in every Stable Diffusion: others of diffusers' blocks see whole pictures."""
    blocks = [block for block, _ in with_sides(unet)]
    resnets = (resnet for block in blocks for resnet in block.resnets)
    samplers = [
        sampler
        for block in blocks
        for name in ("downsamplers", "upsamplers")
        for sampler in getattr(block, name, None) or ()
    ]
    return (
        all(map(is_plain, resnets))
        and all(map(is_plain_sampler, samplers))
        and all(map(is_plain_conv, (unet.conv_in, unet.conv_out)))
        and isinstance(unet.conv_act, nn.SiLU)
    )


def is_plain_sampler(sampler: nn.Module) -> bool:
    return (
        isinstance(sampler, Downsample2D | Upsample2D)
        and sampler.norm is None
        and is_plain_conv(sampler.conv)
        and (isinstance(sampler, Downsample2D) or sampler.interpolate)
    )


def is_plain_conv(conv: nn.Module) -> bool:
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size == (3, 3)
        and conv.padding == (1, 1)
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
    )


class Door(NamedTuple):
    """Where the tokens of a part enter a transformer, and where they go behind it."""

    entry: Tensor  # [computed tokens, 1], an index of rows of the level
    owners: Tensor  # [computed tokens], their pictures
    exit: Tensor  # [tiles, side * side], an index of computed tokens
    exit_owners: Tensor  # [tiles], their pictures among those of the part


@dataclass(frozen=True, eq=False)
class TiledPass:
    """What every part of one pass reads."""

    batch: TiledBatch
    parts: tuple[Pass, ...]
    active: Tensor  # [branches, width], the embedded time as linear layers read it
    kept: KeptPlaces

    def sources(self, module: nn.Module) -> RowSources | None:
        """What branches that compute masked tiles alone read of the others; None: all compute all."""
        if not any(self.batch.reads):
            return None
        found = self.batch.rows.at(self.kept[module], self.batch.reads)
        if isinstance(module, nn.GroupNorm) and isinstance(found, Addresses):
            return Addresses(found.table)  # numbers of tiles are never packed
        return found

    def keep(self, module: nn.Module, picture: int, rows: Tensor) -> None:
        self.batch.rows.keep(self.kept[module], picture, [rows])

    @cached_property
    def doors(self) -> dict[tuple[PartRange, LevelLayout, LevelLayout], Door]:
        return {}

    def door(self, level: TileLevel, where: PartRange, first: LevelLayout, last: LevelLayout) -> Door:
        """Found once for all transformers of a level that compute the same tokens."""
        key = where, first, last
        if key not in self.doors:
            self.doors[key] = find_door(level, *key)
        return self.doors[key]


def predict_tiles(unet: UNet2DConditionModel, positions: Positions, kept: KeptPlaces, batch: TiledBatch) -> Tensor:
    """[tokens of all pictures, channels]; zeros where tiles are not computed"""
    times = [embed_time(unet, part) for part in batch.parts]
    parts = tuple(Pass(part, positions, time, F.silu(time)) for part, time in zip(batch.parts, times, strict=True))
    run = TiledPass(batch, parts, F.silu(torch.cat(times)), kept)
    levels, at = batch.levels, 0
    x = enter_tiles(unet.conv_in, run)
    skips = [x]
    for block in unet.down_blocks:
        for resnet, transformer in pairs(block):
            x = transform_tiles(transformer, convolve_tiles(resnet, x, run, levels[at]), run, levels[at])
            skips.append(x)
        for sampler in block.downsamplers or ():
            x = resample(sampler.conv, x, run, levels[at], levels[at + 1], levels[at + 1].down)
            at += 1
            skips.append(x)
    if unet.mid_block is not None:
        first, *others = unet.mid_block.resnets
        x = convolve_tiles(first, x, run, levels[at])
        for resnet, transformer in zip(others, unet.mid_block.attentions, strict=True):
            x = convolve_tiles(resnet, transform_tiles(transformer, x, run, levels[at]), run, levels[at])
    for block in unet.up_blocks:
        x, at = up_tiles(block, x, run, skips, at)
    columns = norm_columns(unet.conv_norm_out, x, run, levels[0])
    x = convolve_level(unet.conv_out, x, run, levels[0], columns, activates=True)
    index = levels[0].row_of.clamp(min=NOTHING)
    return take_rows(rows_of(x + unet.conv_out.bias[:, None, None]), index[None], index.new_zeros(1))[0]


def up_tiles(block: UnetBlock, x: Tensor, run: TiledPass, skips: list[Tensor], at: int) -> tuple[Tensor, int]:
    levels = run.batch.levels
    for resnet, transformer in pairs(block):
        x = convolve_tiles(resnet, torch.cat([x, skips.pop()], dim=1), run, levels[at])
        x = transform_tiles(transformer, x, run, levels[at])
    for sampler in block.upsamplers or ():
        x = resample(sampler.conv, x, run, levels[at], levels[at - 1], levels[at - 1].up)
        at -= 1
    return x, at


def rows_of(x: Tensor) -> Tensor:
    """[tiles, channels, side, side] -> [tiles * side * side, channels]"""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def squares(rows: Tensor) -> Tensor:
    """[tiles, tokens, channels] -> [tiles, channels, rows, columns]"""
    side = math.isqrt(rows.shape[1])
    return rows.view(len(rows), side, side, rows.shape[2]).permute(0, 3, 1, 2)


def enter_tiles(conv: nn.Conv2d, run: TiledPass) -> Tensor:
    """The first convolution. Its input is known everywhere."""
    level = run.batch.levels[0]
    seen = torch.cat([rows_of(part.sample) for part in run.batch.parts])
    x = squares(take_rows(seen, level.window, level.owners))
    return F.conv2d(x, conv.weight, conv.bias)


def convolve_tiles(resnet: ResnetBlock2D, x: Tensor, run: TiledPass, level: TileLevel) -> Tensor:
    """A plain residual block; as in `resnet.convolve`, biases are added with what comes next."""
    bias = resnet.conv1.bias.expand(len(level.pictures), -1)
    added = bias if resnet.time_emb_proj is None else linear(resnet.time_emb_proj, run.active, EACH_BRANCH) + bias
    columns = norm_columns(resnet.norm1, x, run, level)
    inner = convolve_level(resnet.conv1, x, run, level, columns, activates=True)
    columns = norm_columns(resnet.norm2, inner, run, level, added)
    inner = convolve_level(resnet.conv2, inner, run, level, columns, activates=True)
    return add_bias(x if resnet.conv_shortcut is None else go_around(resnet.conv_shortcut, x), inner, resnet.conv2.bias)


def convolve_level(
    conv: nn.Conv2d, x: Tensor, run: TiledPass, level: TileLevel, columns: Tensor, activates: bool = False
) -> Tensor:
    """A convolution of normed tiles, without its bias."""
    return convolve_rows(conv, rows_of(x), run, level, level, level.halo, columns, activates)


def resample(
    conv: nn.Conv2d, x: Tensor, run: TiledPass, level: TileLevel, to: TileLevel, index: Tensor | None
) -> Tensor:
    """A convolution that leads to another level."""
    assert index is not None
    is_whole = conv.stride == (2, 2) and covers_several(to.side, level.side)
    out = convolve_rows(conv, rows_of(x), run, level, to, index, keeps_all=is_whole)
    return out if conv.bias is None else out + conv.bias[:, None, None]


def convolve_rows(
    conv: nn.Conv2d,
    rows: Tensor,
    run: TiledPass,
    level: TileLevel,
    to: TileLevel,
    index: Tensor,
    columns: Tensor | None = None,
    activates: bool = False,
    keeps_all: bool = False,
) -> Tensor:
    """Convolve rows of a level into tiles of a level, maybe another one, without the bias."""
    for picture, row_of, border in kept_pictures(run, level):
        chosen = row_of if keeps_all else row_of[border]
        kept = take_rows(rows, chosen[None], level.pictures[picture, None], columns, activates)
        run.keep(conv, picture, kept[0])
    gathered = take_rows(rows, index, to.list_owners, columns, activates, run.sources(conv))
    return convolve_lists(conv, gathered, to.side)


def convolve_lists(conv: nn.Conv2d, lists: Tensor, side: int) -> Tensor:
    """Convolve squares of tokens [lists, entries, channels] into tiles [tiles, channels, side, side]. Where a list is
    what one token reads, the convolution is a product."""
    if lists.shape[1] == conv.kernel_size[0] * conv.kernel_size[1]:
        out = F.linear(lists.flatten(1), conv.weight.permute(0, 2, 3, 1).flatten(1))
        return squares(out.view(-1, side * side, out.shape[1]))
    return F.conv2d(squares(lists), conv.weight, None, conv.stride)


def kept_pictures(run: TiledPass, level: TileLevel) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the pictures of which rows are kept, with the rows of their tokens, and their tokens between tiles."""
    for part, border in zip(level.parts, level.borders, strict=True):
        for at in range(part.num_pictures):
            if run.batch.keeps[part.first_picture + at]:
                first = part.first_token + at * part.num_all
                yield part.first_picture + at, level.row_of[first : first + part.num_all], border


def norm_columns(
    norm: nn.GroupNorm, x: Tensor, run: TiledPass, level: TileLevel, added: Tensor | None = None
) -> Tensor:
    """A scale and a shift per picture and channel [pictures, 2, channels], from the statistics of whole pictures."""
    tiles = rows_of(x).unflatten(0, (len(level.owners), -1))
    own = tile_moments(tiles, norm.num_groups, level.owners, level.inside, added)
    moments = take_rows(own, level.tile_of, level.pictures, sources=run.sources(norm))
    for part in level.parts:
        for picture in range(*part.pictures.indices(len(moments))):
            if run.batch.keeps[picture]:
                run.keep(norm, picture, moments[picture, : part.num_own_tiles])
    return tile_columns(moments, level.counts, norm, added)


def transform_tiles(transformer: Transformer2DModel | None, x: Tensor, run: TiledPass, level: TileLevel) -> Tensor:
    """The ragged part."""
    if transformer is None:
        return x
    columns, rows = norm_columns(transformer.norm, x, run, level), rows_of(x)
    parts = [FlowPart(one, where.num_all) for one, where in zip(run.parts, level.parts, strict=True)]
    position = run.parts[0].positions[transformer]
    layouts = [part.layout(position.block) for part in parts]
    lasts = [part.layout(position.block + position.num_blocks - 1) for part in parts]
    doors = list(map(run.door, [level] * len(parts), level.parts, layouts, lasts))
    entering = [take_rows(rows, door.entry, door.owners, columns)[:, 0] for door in doors]
    leaving = split(flow(transformer, concat(entering), parts), lasts)
    batches = [part.run.batch for part in parts]
    left = [
        leave(own, batch, last, position.end, door)
        for own, batch, last, door in zip(leaving, batches, lasts, doors, strict=True)
    ]
    return x + squares(concat(left))


def leave(leaving: Tensor, batch: UnetBatch, layout: LevelLayout, place: int, door: Door) -> Tensor:
    """What a transformer adds to the tiles of a part [tiles, side * side, channels], from its computed tokens."""
    for branch, kind in enumerate(batch.kept_kinds):
        if kind:
            batch.rows.keep(place, branch, [rows_of_branch(layout, leaving, branch)])
    sources = batch.rows.at(place, layout.cached) if any(layout.cached) else None
    return take_rows(leaving, door.exit, door.exit_owners, sources=sources)


def find_door(level: TileLevel, where: PartRange, first: LevelLayout, last: LevelLayout) -> Door:
    row_of = level.row_of[where.first_token : where.first_token + where.num_tokens]
    every = torch.arange(where.num_tokens, device=row_of.device)
    entering = every if first.index is None else first.index
    owners = entering.div(where.num_all, rounding_mode="floor") + where.first_picture
    tokens = level.tokens[where.tiles]
    tokens = torch.where(tokens >= 0, tokens - where.first_token, NOTHING)
    kept = FIRST_KEPT - every % where.num_all
    leaves = every if last.origin is None else torch.where(last.origin.flatten() >= 0, last.origin.flatten(), kept)
    exit_owners = level.owners[where.tiles] - where.first_picture
    return Door(row_of[entering][:, None], owners, find_rows(leaves, tokens), exit_owners)

"""Tiles of pictures of any sizes in one list per level, and where each token around a tile is found. Knows masks and
sizes; knows no weights.

Pictures come in parts: those of one size lie together. A state of a level has one row per token of its tiles, tile
after tile. Tokens of tiles that are not active have no row: convolutions read them from activations. What lies over the
edge of a picture is zero, as the network pads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from instgenie.cost.network import common_share, padded_count
from instgenie.jobs.tiles import Tiles, border_tokens, covers_several
from instgenie.jobs.tokens import pad
from instgenie.kernels.roles import Column, Static
from instgenie.kernels.take import FIRST_KEPT, NOTHING
from instgenie.machine.pages import to_device

TileParts: TypeAlias = tuple[tuple[Tiles, ...], ...]  # per part, the tiles of its pictures, one per branch


class PartRange(NamedTuple):
    """Where a part lies in the list of a level."""

    first_tile: int
    num_tiles: int  # padding included
    first_token: int  # among the tokens of all pictures, one after the other
    num_all: int  # tokens of one picture
    num_own_tiles: int  # tiles of one picture, active or not
    first_picture: int
    num_pictures: int

    @property
    def tiles(self) -> slice:
        return slice(self.first_tile, self.first_tile + self.num_tiles)

    @property
    def pictures(self) -> slice:
        return slice(self.first_picture, self.first_picture + self.num_pictures)

    @property
    def num_tokens(self) -> int:
        return self.num_pictures * self.num_all


@dataclass(frozen=True, eq=False)
class TileLevel:
    """The tiles of one level. Entries of an index are as `take_rows` reads them."""

    side: Static[int]
    parts: Static[tuple[PartRange, ...]]
    owners: Column[Tensor]  # [tiles], the picture of each
    tokens: Column[Tensor]  # [tiles, side * side], among the tokens of all pictures; -1 over the edge
    inside: Column[Tensor]  # [tiles, side * side], bool
    row_of: Column[Tensor]  # [tokens of all pictures], an index: the row of each, or its number among those kept of its
    # picture; `NOTHING` within tiles that are not active
    borders: Column[tuple[Tensor, ...]]  # per part [tokens], those of a picture that lie between two tiles
    window: Column[Tensor]  # [tiles, (side + 2)²], like `tokens`, with a halo of one token
    list_owners: Column[Tensor]  # [lists], the picture of each list of what a convolution reads, see `list_tokens`
    halo: Column[Tensor]  # [lists, (side + 2)² or 9], an index of this level's rows
    tile_of: Column[Tensor]  # [pictures, most tiles of a picture], an index of tiles
    counts: Column[Tensor]  # [pictures, most tiles of a picture], float32, tokens of each tile
    pictures: Column[Tensor]  # [pictures], their numbers
    down: Column[Tensor | None] = None  # [lists, (2 * side + 1)² or 9], an index of the finer level's rows
    up: Column[Tensor | None] = None  # [lists, (side + 2)² or 9], an index of the coarser level's rows


@lru_cache(maxsize=16)  # jobs that stay together keep their layouts from step to step
def lay_out_tiles(levels: tuple[TileParts, ...], pads: bool, max_listed: int = 0) -> tuple[TileLevel, ...]:
    """Lay out the tiles of all levels, the finest first. With `pads`, each part has as many tiles as for many other
    masks. Levels with up to `max_listed` tokens list what convolutions read for each token, others for each tile."""
    shares = [part_share([parts[number] for parts in levels]) if pads else None for number in range(len(levels[0]))]
    drawn = [draw(parts, shares) for parts in levels]
    placed = [place(parts, one) for parts, one in zip(levels, drawn, strict=True)]
    for finer, coarser in pairwise(range(len(levels))):
        down = drawn[coarser].look(drawn[finer].facts, -1, 2 * drawn[coarser].side, factor=2)
        up = drawn[finer].look(drawn[coarser].facts, -1, drawn[finer].side + 1, scale=2)
        several = covers_several(drawn[coarser].side, drawn[finer].side)
        row_of = find_all(levels[finer], drawn[finer]) if several else placed[finer].row_of
        placed[coarser] = replace(placed[coarser], down=find_rows(row_of, down))
        placed[finer] = replace(placed[finer], up=find_rows(placed[coarser].row_of, up))
    return tuple(list_tokens(level) if level.tokens.numel() <= max_listed else level for level in placed)


def list_tokens(level: TileLevel) -> TileLevel:
    """The level with a list per token, of the three by three tokens that a convolution reads for it."""
    return replace(
        level,
        list_owners=level.owners.repeat_interleave(level.side**2),
        halo=around_tokens(level.halo),
        down=None if level.down is None else around_tokens(level.down, step=2),
        up=None if level.up is None else around_tokens(level.up),
    )


def around_tokens(index: Tensor, step: int = 1) -> Tensor:
    """From an index of squares around tiles to one of what lies around each token [tokens, 9]."""
    side = math.isqrt(index.shape[1])
    windows = index.view(-1, side, side).unfold(1, 3, step).unfold(2, 3, step)  # [tiles, rows, columns, 3, 3]
    return windows.reshape(-1, 9)


def part_share(levels: Sequence[Sequence[Tiles]]) -> int | None:
    """The share of all tiles to which the lists of a part are padded at every level; None: all are active, or none."""
    counts = [(sum(len(one.active) for one in part), sum(one.num_all for one in part)) for part in levels]
    return None if all(count == num_all for count, num_all in counts) else common_share(counts)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Where the tiles of a level are."""

    side: int
    parts: tuple[PartRange, ...]
    owners: Tensor  # [tiles]
    numbers: Tensor  # [tiles], in their pictures
    facts: Tensor  # [pictures, 4]: rows and columns of tokens, columns of tiles, the first token among all

    def look(self, facts: Tensor, start: int, end: int, factor: int = 1, scale: int = 1) -> Tensor:
        """The tokens of squares around the tiles [tiles, (end - start)²], at a level of which the pictures have these
        facts; -1 over the edge. A square reaches from `start` to `end`, relative to the tile's corner times a factor.
        With a scale, rows and columns are those of pictures so many times as large."""
        across = self.facts[self.owners, 2]
        near = torch.arange(start, end, device=across.device)
        top, left = self.numbers.div(across, rounding_mode="floor"), self.numbers % across
        row = (factor * self.side * top[:, None] + near)[:, :, None]
        column = (factor * self.side * left[:, None] + near)[:, None, :]
        height, width, _, first = facts[self.owners, :, None, None].unbind(1)
        inside = (row >= 0) & (row < scale * height) & (column >= 0) & (column < scale * width)
        found = first + row.div(scale, rounding_mode="floor") * width + column.div(scale, rounding_mode="floor")
        return torch.where(inside, found, NOTHING).flatten(1)


def draw(parts: TileParts, shares: Sequence[int | None]) -> Drawn:
    device = parts[0][0].active.device
    numbers, owners, ranges = [], [], []
    picture = tile = token = 0
    for part, share in zip(parts, shares, strict=True):
        own = torch.cat([one.active for one in part])
        whose = torch.cat([torch.full_like(one.active, picture + at) for at, one in enumerate(part)])
        count = padded_count(share, sum(one.num_all for one in part)) if share else 0
        if count > len(own):
            own, whose = pad(own, count), pad(whose, count)
        ranges.append(PartRange(tile, len(own), token, part[0].num_tokens, part[0].num_all, picture, len(part)))
        picture, tile, token = picture + len(part), tile + len(own), token + len(part) * part[0].num_tokens
        numbers.append(own)
        owners.append(whose)
    pictures = [one for part in parts for one in part]
    firsts = accumulate((one.num_tokens for one in pictures), initial=0)
    facts = [(*one.grid, one.shape[1], first) for one, first in zip(pictures, firsts, strict=False)]
    facts_there = to_device(torch.tensor(facts), device)
    return Drawn(pictures[0].side, tuple(ranges), torch.cat(owners), torch.cat(numbers), facts_there)


def place(parts: TileParts, drawn: Drawn) -> TileLevel:
    pictures = [one for part in parts for one in part]
    device, side = drawn.owners.device, drawn.side
    tokens = drawn.look(drawn.facts, 0, side)
    borders = [border_tokens(one.grid, side, device) for one in pictures]
    kept = torch.cat([number_kept(one, border) for one, border in zip(pictures, borders, strict=True)])
    row_of = put_first(kept, tokens.flatten())
    window = drawn.look(drawn.facts, -1, side + 1)
    most = max(one.num_all for one in pictures)
    counts = to_device(torch.stack([count_tokens(one, most) for one in pictures]), device)
    tile_of = torch.where(counts > 0, FIRST_KEPT - torch.arange(most, device=device), NOTHING)
    tile_of = put_first(tile_of.flatten(), drawn.owners * most + drawn.numbers).view_as(tile_of)
    return TileLevel(
        side=side,
        parts=drawn.parts,
        owners=drawn.owners,
        tokens=tokens,
        inside=tokens >= 0,
        row_of=row_of,
        borders=tuple(border_tokens(part[0].grid, side, device) for part in parts),
        window=window,
        list_owners=drawn.owners,
        halo=find_rows(row_of, window),
        tile_of=tile_of,
        counts=counts,
        pictures=torch.arange(len(pictures), device=device),
    )


def number_kept(tiles: Tiles, tokens: Tensor) -> Tensor:
    """An index of the tokens of a picture [tokens], of which these are kept."""
    kept = torch.full((tiles.num_tokens,), NOTHING, device=tokens.device)
    return kept.index_copy(0, tokens, FIRST_KEPT - torch.arange(len(tokens), device=tokens.device))


def find_all(parts: TileParts, drawn: Drawn) -> Tensor:
    """As `row_of`, for convolutions of which the input is kept at all tokens."""
    device = drawn.owners.device
    kept = torch.cat([FIRST_KEPT - torch.arange(one.num_tokens, device=device) for part in parts for one in part])
    return put_first(kept, drawn.look(drawn.facts, 0, drawn.side).flatten())


def put_first(values: Tensor, places: Tensor) -> Tensor:
    """The values, with the number of each place put there; where several go to one place, the first of them."""
    none = len(places)
    dump = torch.where(places < 0, len(values), places)
    numbers = torch.arange(none, device=values.device)
    first = values.new_full((len(values) + 1,), none).scatter_reduce(0, dump, numbers, "amin")[:-1]
    return torch.where(first < none, first, values)


def find_rows(row_of: Tensor, tokens: Tensor) -> Tensor:
    """An index of the rows of tokens, which may be -1."""
    return torch.where(tokens >= 0, row_of[tokens.clamp(min=0)], NOTHING)


def count_tokens(tiles: Tiles, most: int) -> Tensor:
    """Tokens of each tile of a picture [most], float32; 0 for tiles that it does not have."""
    down, across = (
        torch.tensor([min(tiles.side, length - first) for first in range(0, length, tiles.side)], dtype=torch.float32)
        for length in tiles.grid
    )
    own = torch.outer(down, across).flatten()
    return torch.cat([own, own.new_zeros(most - len(own))])

"""Tiles: the squares of tokens in which convolutions are computed. Knows masks; knows no model.

A picture is cut into squares of one side, row by row; the last ones of a row or a column may reach over its edge.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.cost.network import is_at_border
from instgenie.machine.pages import to_device


@dataclass(frozen=True, eq=False)
class Tiles:
    """The active tiles of one picture at one level."""

    grid: tuple[int, int]  # rows and columns of tokens
    side: int
    active: Tensor  # [active tiles], their numbers

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.grid[0] // self.side), -(-self.grid[1] // self.side)

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_all(self) -> int:
        return self.shape[0] * self.shape[1]


def side_at(tile: int, level_side: int) -> int:
    """The side of a tile at a level at which a token stands for `level_side` by `level_side` of the finest. Coarser
    levels have smaller tiles, so that the same share of a picture is active: lists of tiles are padded to one share."""
    return max(tile // level_side, 1)


def covers_several(coarser_side: int, side: int) -> bool:
    """Return whether a tile of the next coarser level lies over several tiles of a level, of which some may not be
    active. Convolutions that halve the picture read all of them."""
    return 2 * coarser_side > side


@lru_cache(maxsize=64)
def border_tokens(grid: tuple[int, int], side: int, device: torch.device) -> Tensor:
    """The tokens that lie between two tiles [tokens], which are all that convolutions read around a tile; of a picture
    with one tile, the first token."""
    down, across = (torch.tensor([is_at_border(number, length, side) for number in range(length)]) for length in grid)
    found = (down[:, None] | across[None, :]).flatten().nonzero()[:, 0]
    found = found if len(found) else torch.zeros(1, dtype=torch.int64)
    return to_device(found, device)


def masked_tiles(masked: Tensor, grid: tuple[int, int], side: int) -> Tiles:
    """The tiles that have any masked token, from a mask of all tokens. Waits for the device."""
    active = F.max_pool2d(masked.view(1, 1, *grid).float(), side, ceil_mode=True).flatten() > 0
    return Tiles(grid, side, active.nonzero()[:, 0])


@lru_cache(maxsize=64)  # layouts are found by the identity of what they lay out
def every_tile(grid: tuple[int, int], side: int, device: torch.device) -> Tiles:
    empty = Tiles(grid, side, torch.empty(0))
    return Tiles(grid, side, torch.arange(empty.num_all, device=device))

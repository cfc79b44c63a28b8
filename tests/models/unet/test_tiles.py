"""Tiles of pictures of several sizes: convolutions over them are those over whole pictures."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.cost.network import ConvolutionShape
from instgenie.jobs.tiles import Tiles, border_tokens, covers_several, every_tile, masked_tiles, side_at
from instgenie.kernels.take import FIRST_KEPT, NOTHING, take_rows_reference
from instgenie.models.unet.tiled import convolve_lists, rows_of
from instgenie.models.unet.tiles import TileLevel, lay_out_tiles

GRIDS = [(16, 12), (16, 12), (6, 20), (2, 2)]  # two pictures of one size, and pictures that are no multiple of a tile
CPU = torch.device("cpu")


def lay_out(
    tile: int, actives: list[Tensor] | None = None, pads: bool = False, max_listed: int = 0
) -> tuple[TileLevel, ...]:
    """Two levels; `actives` are masks of the pictures."""
    levels = []
    for side in (1, 2):
        grids = [(rows // side, columns // side) for rows, columns in GRIDS]
        own = side_at(tile, side)
        tiles = [
            every_tile(grid, own, CPU)
            if actives is None
            else masked_tiles(F.max_pool2d(mask[None, None].float(), side), grid, own)
            for grid, mask in zip(grids, actives or [None] * len(grids), strict=True)
        ]
        levels.append((tuple(tiles[:2]), (tiles[2],), (tiles[3],)))
    return lay_out_tiles(tuple(levels), pads, max_listed)


def draw_pictures(side: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 3, rows // side, columns // side, dtype=torch.float64) for rows, columns in GRIDS]


def to_tiles(pictures: list[Tensor], level: TileLevel) -> Tensor:
    """The rows of the active tiles; rubbish over the edge, which nothing may read."""
    rows = torch.cat([rows_of(picture) for picture in pictures])
    return torch.where(level.inside.flatten()[:, None], rows[level.tokens.flatten().clamp(min=0)], torch.nan)


def to_pictures(tiles: Tensor, level: TileLevel, side: int = 1) -> list[Tensor]:
    """Whole pictures; NaN where tiles are not active."""
    index = level.row_of
    rows = torch.where((index >= 0)[:, None], rows_of(tiles)[index.clamp(min=0)], torch.nan)
    grids = [(rows // side, columns // side) for rows, columns in GRIDS]
    parts = rows.split([rows * columns for rows, columns in grids])
    return [part.T.reshape(1, -1, *grid) for part, grid in zip(parts, grids, strict=True)]


def convolve(
    weight: Tensor,
    rows: Tensor,
    index: Tensor | None,
    to: TileLevel,
    kept: list[Tensor] | None = None,
    side: int = 1,
    stride: int = 1,
) -> list[Tensor]:
    """Whole pictures, of which a token stands for `side` by `side`, from rows of a level."""
    assert index is not None
    conv = nn.Conv2d(3, 4, 3, stride, bias=False)
    conv.weight = nn.Parameter(weight, requires_grad=False)
    lists = take_rows_reference(rows, index, to.list_owners, None, False, [own[None] for own in kept] if kept else None)
    return to_pictures(convolve_lists(conv, lists, to.side), to, side)


def between_tiles(pictures: list[Tensor], side: int) -> list[Tensor]:
    """What is kept of pictures."""
    return [rows_of(one)[border_tokens((one.shape[2], one.shape[3]), side, CPU)] for one in pictures]


@pytest.mark.parametrize("max_listed", [0, 500, 1000])  # no level, the coarser one, both
@pytest.mark.parametrize("tile", [1, 2, 8, 16])
def test_convolutions_of_all_tiles(tile: int, max_listed: int) -> None:
    fine, coarse = lay_out(tile, max_listed=max_listed)
    assert (fine.halo.shape[1] == 9, coarse.halo.shape[1] == 9) == (
        max_listed >= fine.tokens.numel() or tile == 1,
        max_listed >= coarse.tokens.numel() or tile <= 2,
    )
    pictures, weight = draw_pictures(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    state, small = to_tiles(pictures, fine), draw_pictures(side=2)
    same = convolve(weight, state, fine.halo, fine)
    down = convolve(weight, state, coarse.down, coarse, side=2, stride=2)
    up = convolve(weight, to_tiles(small, coarse), fine.up, fine)
    for number, picture in enumerate(pictures):
        torch.testing.assert_close(same[number], F.conv2d(picture, weight, padding=1))
        torch.testing.assert_close(down[number], F.conv2d(picture, weight, padding=1, stride=2))
        doubled = F.interpolate(small[number], scale_factor=2.0)
        torch.testing.assert_close(up[number], F.conv2d(doubled, weight, padding=1))


def corner_masks() -> list[Tensor]:
    """One pixel in a corner, a box that touches two edges, a column, everything."""
    masks = [torch.zeros(grid, dtype=torch.bool) for grid in GRIDS]
    masks[0][-1, -1] = True
    masks[1][:3, 5:] = True
    masks[2][:, 9] = True
    masks[3][:] = True
    return masks


@pytest.mark.parametrize(("pads", "max_listed"), [(False, 0), (False, 1000), (True, 0)])
@pytest.mark.parametrize("tile", [1, 2, 8, 16])
def test_convolutions_of_masked_tiles_read_the_others(tile: int, pads: bool, max_listed: int) -> None:
    fine, coarse = lay_out(tile, corner_masks(), pads, max_listed)
    pictures, weight = draw_pictures(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    state, small = to_tiles(pictures, fine), draw_pictures(side=2)
    kept = between_tiles(pictures, fine.side)
    same = convolve(weight, state, fine.halo, fine, kept)
    several = covers_several(coarse.side, fine.side)
    assert several == (tile == 1)
    kept_below = list(map(rows_of, pictures)) if several else kept
    halved = convolve(weight, state, coarse.down, coarse, kept_below, side=2, stride=2)
    doubled = convolve(weight, to_tiles(small, coarse), fine.up, fine, between_tiles(small, coarse.side))
    for number, mask in enumerate(corner_masks()):
        whole = F.conv2d(pictures[number], weight, padding=1)
        assert not same[number][:, :, mask].isnan().any()
        torch.testing.assert_close(same[number], torch.where(same[number].isnan(), torch.nan, whole), equal_nan=True)
        whole = F.conv2d(pictures[number], weight, padding=1, stride=2)
        known = torch.where(halved[number].isnan(), torch.nan, whole)
        torch.testing.assert_close(halved[number], known, equal_nan=True)
        whole = F.conv2d(F.interpolate(small[number], scale_factor=2.0), weight, padding=1)
        known = torch.where(doubled[number].isnan(), torch.nan, whole)
        torch.testing.assert_close(doubled[number], known, equal_nan=True)
    if tile == 2:
        assert len(fine.owners) < sum(one.numel() for one in corner_masks()) // 4
        assert (fine.tile_of[0] == FIRST_KEPT - torch.arange(48)).sum() == 47


def test_tiles_know_their_pictures() -> None:
    fine, _ = lay_out(8)
    assert [(part.num_tiles, part.num_all, part.num_pictures) for part in fine.parts] == [
        (8, 192, 2), (3, 120, 1), (1, 4, 1),
    ]  # fmt: skip
    assert fine.counts.tolist() == [[64, 32, 64, 32], [64, 32, 64, 32], [48, 48, 24, 0], [4, 0, 0, 0]]
    assert fine.tile_of.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, NOTHING], [11, *[NOTHING] * 3]]
    assert Tiles((9, 17), 8, torch.empty(0)).shape == (2, 3)


@pytest.mark.parametrize("grid", [(16, 12), (6, 20), (9, 17), (2, 2)])
@pytest.mark.parametrize("tile", [2, 4, 8])
def test_rows_that_are_kept(tile: int, grid: tuple[int, int]) -> None:
    """Those that touch a token of another tile, and no others; one if there is no other tile."""
    number = torch.arange(grid[0])[:, None] // tile * 100 + torch.arange(grid[1]) // tile
    around = F.pad(number[None, None].float(), (1, 1, 1, 1), mode="replicate")[0, 0].unfold(0, 3, 1).unfold(1, 3, 1)
    touches = (around != number[:, :, None, None]).flatten(2).any(2).flatten().nonzero()[:, 0].tolist() or [0]
    assert border_tokens(grid, tile, CPU).tolist() == touches
    shapes = [ConvolutionShape(8, 1, tile, rows) for rows in ("border", "all", "tiles")]
    assert [shape.num_rows(grid) for shape in shapes] == [len(touches), number.numel(), len(number.unique())]


def test_padded_lists_have_one_length() -> None:
    """For masks of about the same number of tiles; what they read stays the same."""
    masks = corner_masks()
    masks[0][-1, -4] = True
    wider = [mask.clone() for mask in masks]
    wider[0][0, 0] = True
    shapes = [[len(level.owners) for level in lay_out(2, given, pads=True)] for given in (masks, wider)]
    assert shapes[0] == shapes[1]
    assert [len(level.owners) for level in lay_out(2, masks)] != [len(level.owners) for level in lay_out(2, wider)]

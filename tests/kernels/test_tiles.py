"""The kernels of tiles against their references in float64, and these against plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.kernels.addresses import Addresses
from instgenie.kernels.packed import PackedRows, pack_rows, unpacked
from instgenie.kernels.take import FIRST_KEPT, NOTHING, take_rows_fused, take_rows_reference
from instgenie.kernels.tile_norm import (
    tile_columns_fused,
    tile_columns_reference,
    tile_moments_fused,
    tile_moments_reference,
)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def close(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found.double(), truth, rtol=ROUNDING[found.dtype], atol=1e-5)


def draw_index(num_rows: int, num_kept: int, device: str) -> Tensor:  # [5, 36]
    torch.manual_seed(1)
    index = torch.randint(FIRST_KEPT - num_kept + 1, num_rows, (5, 36))
    index[0] = NOTHING
    return index.to(device)


@pytest.mark.parametrize("has_columns", [True, False])
@pytest.mark.parametrize("width", [8, 72, 320])
def test_taking_rows(device: str, dtype: torch.dtype, width: int, has_columns: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, width, device=device, dtype=dtype)
    kept = torch.randn(3, 1, 40, width, device=device, dtype=dtype)
    owners = torch.tensor([2, 0, 1, 1, 2], device=device)
    columns = torch.randn(3, 2, width, device=device) if has_columns else None
    index = draw_index(len(rows), 40, device)
    take = partial(take_rows_reference, rows.double(), index, owners, columns, has_columns)
    truth = take([one.double() for one in kept])
    close(take_rows_fused(rows, index, owners, columns, has_columns, list(kept)), truth)
    table = Addresses(torch.tensor([one.data_ptr() for one in kept], device=device))
    close(take_rows_fused(rows, index, owners, columns, has_columns, table), truth)
    close(take_rows_fused(rows, index.clamp(min=NOTHING), owners, columns, has_columns, None), take_own(take, index))


def take_own(take: partial[Tensor], index: Tensor) -> Tensor:
    rows, _, *others = take.args
    return take_rows_reference(rows, index.clamp(min=NOTHING), *others, None)


@pytest.mark.parametrize("width", [64, 320])
def test_taking_packed_rows(device: str, dtype: torch.dtype, width: int) -> None:
    """The second picture has none."""
    torch.manual_seed(0)
    rows = torch.randn(50, width, device=device, dtype=dtype)
    kept = torch.randn(1, 40, width, device=device, dtype=dtype)
    owners, index = torch.tensor([0, 0, 1, 0, 1], device=device), draw_index(len(rows), 40, device)
    index[owners == 1] = index[owners == 1].clamp(min=NOTHING)
    for packing in ("fp8", "int4"):
        packed = pack_rows(kept, packing)
        truth = take_rows_reference(
            rows.double(), index, owners, None, False, [unpacked(packed, packing, dtype).double(), None]
        )
        close(take_rows_fused(rows, index, owners, None, False, [PackedRows(packed, packing), None]), truth)
        table = Addresses(torch.tensor([packed.data_ptr(), 0], device=device), (packing, packing))
        close(take_rows_fused(rows, index, owners, None, False, table), truth)


@torch.no_grad()
@pytest.mark.parametrize("has_added", [True, False])
@pytest.mark.parametrize("num_channels", [8, 96, 640])
def test_norms(device: str, dtype: torch.dtype, num_channels: int, has_added: bool) -> None:
    torch.manual_seed(0)
    tiles = (3 * torch.randn(7, 16, num_channels, device=device) + 5).to(dtype)
    inside = torch.rand(7, 16, device=device) > 0.3
    owners = torch.tensor([0, 0, 1, 1, 1, 1, 2], device=device)
    added = torch.randn(3, num_channels, device=device).to(dtype) if has_added else None
    wide = added.double() if added is not None else None
    truth = tile_moments_reference(tiles.double(), 4, owners, inside, wide)
    found = tile_moments_fused(tiles, 4, owners, inside, added)
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)
    norm = nn.GroupNorm(4, num_channels, device=device, dtype=dtype)
    norm.weight.normal_()
    counts = torch.randint(1, 16, (3, 5), device=device).float()
    counts[1, 3:] = 0
    moments = torch.rand(3, 5, 8, device=device)
    moments[1, 3:] = 0
    columns = tile_columns_fused(moments, counts, norm, added)
    expected = tile_columns_reference(moments.double(), counts.double(), norm.double(), wide)
    torch.testing.assert_close(columns.double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_norms_of_tiles_are_those_of_pictures(offset: float) -> None:
    """Also where the values are far from zero, and of a picture whose sides are no multiple of a tile's."""
    torch.manual_seed(0)
    picture, norm = torch.randn(1, 12, 6, 7) + offset, nn.GroupNorm(3, 12)
    norm.weight.normal_()
    added = torch.randn(1, 12)
    padded = F.pad(picture, (0, 1, 0, 2))
    tiles = padded.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(4, 16, 12)
    inside = F.pad(torch.ones(6, 7, dtype=torch.bool), (0, 1, 0, 2)).unfold(0, 4, 4).unfold(1, 4, 4).reshape(4, 16)
    owners = torch.zeros(4, dtype=torch.int64)
    moments = tile_moments_reference(tiles, 3, owners, inside, added)[None]
    scale, shift = tile_columns_reference(moments, inside.sum(1)[None].float(), norm, added)[0]
    found = picture * scale[:, None, None] + shift[:, None, None]
    torch.testing.assert_close(found, norm(picture + added[:, :, None, None]), rtol=1e-4, atol=2e-4)


def test_sources_are_read_by_their_owners() -> None:
    rows, kept = torch.arange(6.0).view(3, 2), [10 + torch.zeros(1, 2, 2), None, torch.arange(40.0, 48).view(1, 4, 2)]
    index = torch.tensor([[0, NOTHING, FIRST_KEPT], [2, FIRST_KEPT - 3, 1]])
    taken = take_rows_reference(rows, index, torch.tensor([0, 2]), None, False, kept)
    assert taken.tolist() == [[[0, 1], [0, 0], [10, 10]], [[4, 5], [46, 47], [2, 3]]]

"""The kernel that adds products of low rank, against its reference in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from instgenie.kernels.low_rank import LowRank, LowRankLayers, RowPart, add_low_rank_fused, add_low_rank_reference

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
SCALES = (0.7, -1.3, 0.05)


@pytest.fixture(autouse=True)
def can_multiply(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as whole numbers")


def draw(ranks: list[list[int]], inputs: int, outputs: int, device: str, dtype: torch.dtype) -> LowRankLayers:
    """For each layer, products of these ranks."""
    random = partial(torch.randn, device=device, dtype=dtype)
    return LowRankLayers(
        [
            [
                LowRank(random(rank, inputs) * inputs**-0.5, random(outputs, rank), scale)
                for rank, scale in zip(own, SCALES, strict=False)
            ]
            for own in ranks
        ]
    )


def in_double(layers: LowRankLayers) -> LowRankLayers:
    return LowRankLayers(
        [[LowRank(low.down.double(), low.up.double(), low.scale) for low in products] for products in layers.layers]
    )


def check(rows: Tensor, out: Tensor, parts: list[RowPart], number: int) -> Tensor:
    """The change of `out`, which is compared with that in float64."""
    found, truth = out.clone(), out.double()
    wide = tuple(part._replace(layers=in_double(part.layers)) for part in parts)
    add_low_rank_fused(rows, found, tuple(parts), number)
    add_low_rank_reference(rows.double(), truth, wide, number)
    rounding = ROUNDING[out.dtype]
    torch.testing.assert_close(found.double(), truth, rtol=rounding, atol=rounding * float(truth.abs().max()))
    return (found - out).abs().amax(dim=1)


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (72, 216), (320, 1280), (3072, 300)])
def test_parts_with_other_products_and_none(device: str, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """One launch: ranks of every size, several products, one, none at this layer, none at all; rows of nobody."""
    torch.manual_seed(0)
    make = partial(draw, inputs=inputs, outputs=outputs, device=device, dtype=dtype)
    layers = [make([[], [4]]), make([[1], [16, 3, 70]]), make([[2], []]), make([[], []]), make([[8], [64]])]
    ends = [40, 41, 90, 95, 130]
    firsts = [3, *ends[:-1]]
    parts = [RowPart(*one) for one in zip(firsts, ends, layers, strict=True)]
    rows = torch.randn(133, inputs, device=device, dtype=dtype)
    out = torch.randn(133, 2 * outputs, device=device, dtype=dtype)[:, outputs:]  # columns of one product
    changed = check(rows, out, parts, 1) > 0
    is_patched = torch.zeros(133, dtype=torch.bool, device=device)
    for first, end in ((3, 40), (40, 41), (95, 130)):
        is_patched[first:end] = True
    assert torch.equal(changed, is_patched)
    check(rows, out, parts, 0)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17])
def test_few_rows_and_many_columns(device: str, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    part = RowPart(0, num_rows, draw([[16]], 48, 2000, device, dtype))
    rows, out = (torch.randn(num_rows, width, device=device, dtype=dtype) for width in (48, 2000))
    if num_rows:
        assert check(rows, out, [part], 0).min() > 0
    else:
        add_low_rank_fused(rows, out, (part,), 0)


def test_convolutions_whose_patches_are_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    low = LowRank(random(3, 8, 2, 2), random(40, 3), 0.5)
    rows, out = random(20, 32), random(20, 40)
    found, expected = out.clone(), out.clone()
    add_low_rank_fused(rows, found, (RowPart(0, 20, LowRankLayers([[low]])),), 0)
    add_low_rank_reference(rows, expected, (RowPart(0, 20, LowRankLayers([[low]])),), 0)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * scale)

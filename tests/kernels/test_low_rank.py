"""The kernel that adds products of low rank, against its reference in float64."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from instgenie.kernels.low_rank import (
    LowRank,
    LowRankLayers,
    LowRankRows,
    RankClass,
    add_low_rank_reference,
    launch,
    make_slots,
    start_low_rank,
)

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


def rows_of(branches: list[LowRankLayers | None], counts: list[int], device: str) -> LowRankRows:
    """The rows of branches; they have bounds unless all are equally many. Two rows lie behind the last bound."""
    rank_class = RankClass.join([one.rank_class for one in branches if one])
    is_uniform = len(set(counts)) == 1
    bounds = None if is_uniform else torch.tensor([0, *accumulate(counts[:-1]), sum(counts) - 2], device=device)
    return LowRankRows(make_slots(branches, torch.device(device)), rank_class, counts[0] if is_uniform else 0, bounds)


def truth_of(rows: Tensor, out: Tensor, branches: list[LowRankLayers | None], counts: list[int], number: int) -> Tensor:
    truth = out.double()
    wide = [in_double(one) if one else None for one in branches]
    add_low_rank_reference(rows.double(), truth, rows_of(wide, counts, str(rows.device)), number)
    return truth


def check_close(found: Tensor, truth: Tensor) -> None:
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), truth, rtol=rounding, atol=rounding * float(truth.abs().max()))


def check(rows: Tensor, out: Tensor, branches: list[LowRankLayers | None], counts: list[int], number: int) -> Tensor:
    """The change of `out`, which is compared with that in float64."""
    found, truth = out.clone(memory_format=torch.preserve_format), truth_of(rows, out, branches, counts, number)
    whose = rows_of(branches, counts, str(rows.device))
    launch(rows, found, whose, (number,), (out.shape[1],), None, writes=False)
    check_close(found, truth)
    return (found - out).abs().amax(dim=1)


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (72, 216), (320, 1280), (3072, 300)])
@pytest.mark.parametrize("counts", [[3, 37, 1, 49, 0, 5, 35], [19] * 7], ids=["uneven", "even"])
def test_branches_with_other_products_and_none(
    device: str, dtype: torch.dtype, inputs: int, outputs: int, counts: list[int]
) -> None:
    """One launch: ranks of every size, several products, one, none at this layer, none at all."""
    torch.manual_seed(0)
    make = partial(draw, inputs=inputs, outputs=outputs, device=device, dtype=dtype)
    rank_64 = make([[8], [64]])
    ranks = [None, make([[], [4]]), make([[1], [16, 3, 70]]), make([[2], []]), rank_64, make([[], []]), rank_64]
    num_rows = sum(counts)
    rows = torch.randn(num_rows, inputs, device=device, dtype=dtype)
    out = torch.randn(num_rows, 2 * outputs, device=device, dtype=dtype)[:, outputs:]  # columns of one product
    changed = check(rows, out, ranks, counts, 1) > 0
    is_patched = [branch in (1, 2, 4, 6) for branch, num in enumerate(counts) for _ in range(num)]
    assert changed.tolist() == is_patched
    check(rows, out, ranks, counts, 0)


@pytest.mark.parametrize("num_rows", [0, 1, 16, 17])
def test_few_rows_and_many_columns(device: str, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    layers = draw([[16]], 48, 2000, device, dtype)
    rows, out = (torch.randn(num_rows, width, device=device, dtype=dtype) for width in (48, 2000))
    if num_rows:
        assert check(rows, out, [layers], [num_rows], 0).min() > 0
    else:
        launch(rows, out, rows_of([layers], [0], device), (0,), (2000,), None, writes=False)


@pytest.mark.parametrize("counts", [[20, 33, 7], [20, 20, 20]], ids=["uneven", "even"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("widths", [(40, 64, 8), (48, 160)])
def test_outputs_of_several_layers_are_written(
    device: str, dtype: torch.dtype, counts: list[int], has_bias: bool, widths: tuple[int, ...]
) -> None:
    """Nothing is read that was there before: a branch without products has the bias alone."""
    torch.manual_seed(0)
    layers = [draw([[16, 3]], 48, width, device, dtype).layers[0] for width in widths]
    first, last = LowRankLayers([(), *layers]), LowRankLayers([(), layers[0], *([()] * (len(layers) - 1))])
    branches = [first, None, last]
    rows = torch.randn(sum(counts), 48, device=device, dtype=dtype)
    bias = torch.randn(sum(widths), device=device, dtype=dtype) if has_bias else None
    numbers = range(1, len(widths) + 1)
    found = start_low_rank(rows, rows_of(branches, counts, device), numbers, widths, bias)
    start = 0
    for number, width in zip(numbers, widths, strict=True):
        own = slice(start, start := start + width)
        before = found.new_zeros(len(rows), width) if bias is None else bias[own].expand(len(rows), -1)
        check_close(found[:, own], truth_of(rows, before, branches, counts, number))


def test_slots_are_filled_anew(device: str, dtype: torch.dtype) -> None:
    """The same slots with other products, as a captured pass reads them."""
    torch.manual_seed(0)
    one, other = (draw([[16]], 48, 64, device, dtype) for _ in range(2))
    rows, out = (torch.randn(40, width, device=device, dtype=dtype) for width in (48, 64))
    whose = rows_of([one, other], [20, 20], device)
    for branches in ([other, None], [None, None], [one, other]):
        whose.slots.copy_(make_slots(branches, whose.slots.device))
        found = out.clone()
        launch(rows, found, whose, (0,), (64,), None, writes=False)
        check_close(found, truth_of(rows, out, branches, [20, 20], 0) if any(branches) else out.double())


def test_convolutions_whose_patches_are_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    layers = LowRankLayers([[LowRank(random(3, 8, 2, 2), random(40, 3), 0.5)]])
    assert check(random(20, 32), random(20, 40), [layers], [20], 0).min() > 0

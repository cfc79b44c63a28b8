"""The kernel that multiplies the rows of each branch by weights of its own, against its reference in float64."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from instgenie.kernels.grouped_linear import choose_blocks, grouped_linear_reference, launch_grouped
from instgenie.kernels.low_rank import LowRankRows, RankClass

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
NUMBER = 2  # of the layer, of three


@pytest.fixture(autouse=True)
def can_multiply(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as whole numbers")


class Weights:
    """The weights of some branches: each set has a table of its own, and branches may share a set. A set without a
    weight, and a branch without a set, have the layer's own."""

    def __init__(self, sets: Sequence[Tensor | None]) -> None:
        self.sets = sets
        device = next(one.device for one in sets if one is not None)
        self.tables = [torch.zeros(3, dtype=torch.int64, device=device) for _ in sets]
        for table, own in zip(self.tables, sets, strict=True):
            table[NUMBER] = 0 if own is None else own.data_ptr()

    def addresses(self, branches: Sequence[int | None]) -> Tensor:
        found = [0 if one is None else self.tables[one].data_ptr() for one in branches]
        return torch.tensor(found, device=self.tables[0].device)


def whose_rows(weights: Weights, branches: Sequence[int | None], counts: list[int]) -> LowRankRows:
    """Rows of branches; they have bounds unless all are equally many. Two rows lie behind the last bound."""
    copies = weights.addresses(branches)
    is_uniform = len(set(counts)) == 1
    bounds = [0, *accumulate(counts[:-1]), sum(counts) - 2]
    placed = None if is_uniform else torch.tensor(bounds, device=copies.device)
    slots = torch.zeros(len(branches), 2, dtype=torch.int64, device=copies.device)
    return LowRankRows(slots, RankClass(), counts[0] if is_uniform else 0, placed, copies)


def check(
    found: Tensor, rows: Tensor, base: Tensor, bias: Tensor | None, weights: Weights, owners: Sequence[int | None]
) -> None:
    """Compare with the product of each row with the weight of its owner, in float64."""
    own = [base if one is None or weights.sets[one] is None else weights.sets[one] for one in owners]
    truth = torch.stack([weight.double() @ row for weight, row in zip(own, rows.double(), strict=True)])
    truth = truth if bias is None else truth + bias.double()
    rounding = ROUNDING[rows.dtype]
    torch.testing.assert_close(found.double(), truth, rtol=rounding, atol=rounding * float(truth.abs().max()))


def draw(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape) * shape[-1] ** -0.5).to(device, dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (72, 216), (200, 130), (64, 512)])
@pytest.mark.parametrize("counts", [[3, 150, 1, 70, 0, 5, 35], [37] * 7, [1] * 7], ids=["uneven", "even", "single"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_rows_are_multiplied_by_the_weights_of_their_branch(
    device: str, dtype: torch.dtype, inputs: int, outputs: int, counts: list[int], has_bias: bool
) -> None:
    """One launch, for branches with weights of their own, with shared ones, with none at this layer and with none."""
    torch.manual_seed(0)
    base, one, other = (draw(outputs, inputs, device=device, dtype=dtype) for _ in range(3))
    bias = draw(outputs, device=device, dtype=dtype) if has_bias else None
    weights, branches = Weights([one, other, None]), [None, 0, 0, 1, 1, 2, 0]
    rows = draw(sum(counts), 2 * inputs, device=device, dtype=dtype)[:, inputs:]  # columns of one product
    whose = whose_rows(weights, branches, counts)
    owners = [branch for branch, count in zip(branches, counts, strict=True) for _ in range(count)]
    for multiply in (launch_grouped, grouped_linear_reference):
        check(multiply(rows, base, bias, whose, NUMBER), rows, base, bias, weights, owners)


def test_a_repeated_launch_reads_other_weights(device: str, dtype: torch.dtype) -> None:
    """The same place with other addresses and bounds, as a captured pass reads them."""
    torch.manual_seed(0)
    base, one, other = (draw(40, 48, device=device, dtype=dtype) for _ in range(3))
    rows, weights = draw(60, 48, device=device, dtype=dtype), Weights([one, other])
    whose = whose_rows(weights, [0, 1, None], [40, 13, 7])
    assert whose.copies is not None
    assert whose.bounds is not None
    for branches, counts in (([1, None, 0], [2, 0, 58]), ([None] * 3, [20, 15, 25]), ([0, 0, 1], [0, 55, 5])):
        whose.copies.copy_(weights.addresses(branches))
        whose.bounds.copy_(torch.tensor([0, *accumulate(counts)]))
        owners = [branch for branch, count in zip(branches, counts, strict=True) for _ in range(count)]
        check(launch_grouped(rows, base, None, whose, NUMBER), rows, base, None, weights, owners)


def test_no_rows(device: str, dtype: torch.dtype) -> None:
    base = draw(8, 16, device=device, dtype=dtype)
    weights = Weights([base])
    whose = whose_rows(weights, [0], [0])
    assert launch_grouped(base[:0], base, None, whose, NUMBER).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [128, 256], ids=["few", "many"])
@pytest.mark.parametrize("outputs", [640, 1280])
def test_every_choice_of_blocks_runs(num_rows: int, outputs: int) -> None:
    """With the widths of a large model, in bfloat16."""
    torch.manual_seed(0)
    base, one = (draw(outputs, 640, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows, weights = draw(3 * num_rows, 640, device="cuda", dtype=torch.bfloat16), Weights([one])
    whose = whose_rows(weights, [0, None, 0], [num_rows] * 3)
    assert choose_blocks(num_rows, outputs, rows.dtype).rows <= num_rows
    owners = [branch for branch in (0, None, 0) for _ in range(num_rows)]
    check(launch_grouped(rows, base, None, whose, NUMBER), rows, base, None, weights, owners)

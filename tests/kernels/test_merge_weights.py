"""The kernel that writes weights with products of low rank added, against its reference."""

from functools import partial
from itertools import accumulate

import pytest
import torch

from instgenie.kernels.low_rank import LowRank, LowRankLayers
from instgenie.kernels.merge_weights import launch_merge, merge_weights_reference, view_at


@pytest.mark.parametrize("shapes", [[(128, 128), (256, 64)], [(1, 16), (130, 200), (40, 300)]], ids=["wide", "any"])
def test_weights_of_several_layers(device: str, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> None:
    """One launch, for layers with several products, with one and with none. The model's weights stay."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as whole numbers")
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    ranks = [[16, 3], [], [70], [8, 1, 24]][: len(shapes) + 1]
    products = LowRankLayers(
        [
            [LowRank(random(rank, inputs), random(outputs, rank) * rank**-0.5, 0.5 - rank % 2) for rank in own]
            for own, (outputs, inputs) in zip(ranks, [(8, 8), *shapes], strict=True)
        ]
    )
    weights = [random(*shape) for shape in shapes]
    before, numbers = [weight.clone() for weight in weights], list(range(1, len(shapes) + 1))
    places = [0, *accumulate(-(-weight.nbytes // 128) * 128 for weight in weights)]
    found, expected = (torch.full((places[-1],), 255, dtype=torch.uint8, device=device) for _ in range(2))
    launch_merge(weights, found, places[:-1], products, numbers)
    merge_weights_reference(weights, expected, places[:-1], products, numbers)
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    for weight, place, own in zip(weights, places, products.layers[1:], strict=False):
        one, other = (view_at(memory, place, weight) for memory in (found, expected))
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)
        assert torch.equal(one, weight) == (not own)
    assert all(map(torch.equal, weights, before))

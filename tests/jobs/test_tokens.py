"""Lists of tokens: halos and padding."""

import numpy as np
import pytest
import torch

from instgenie.cost.network import common_share, padded_count
from instgenie.jobs.tokens import JobTokens, bucket, pad, spread
from instgenie.pictures.mask import token_mask


def test_padding() -> None:
    assert [bucket(count, 1024) for count in (1, 32, 33, 1000, 1024)] == [32, 32, 64, 1024, 1024]
    assert [bucket(count, 10) for count in (1, 9, 10)] == [1, 9, 10]
    assert [bucket(count, 4096, 32) for count in (1, 96, 97, 450, 480, 481)] == [96, 96, 128, 480, 480, 512]
    assert [bucket(count, 4096, 512) for count in (1, 128, 450)] == [128, 128, 512]  # the text fills its own tiles
    assert pad(torch.tensor([3, 5]), 4).tolist() == [3, 5, 5, 5]
    assert common_share([(200, 1024), (250, 1024), (60, 256)]) == 8
    assert common_share([(200, 1024), (250, 1024), (70, 256)]) == 10
    assert [common_share([(count, 10)]) for count in (1, 9, 10)] == [4, 32, 32]
    assert [padded_count(share, 1024) for share in (2, 12, 32)] == [64, 384, 1024]
    assert common_share([(0, 1024), (900, 1024)]) is None
    assert common_share([]) is None


@pytest.mark.parametrize("halo", [1, 2, 9])
def test_a_halo_is_what_the_mask_says_it_is(halo: int) -> None:
    pixels = np.zeros((28, 36), dtype=np.bool_)
    pixels[5:9, 30] = True
    masked = torch.tensor(token_mask(pixels, 4)).reshape(-1, 1)
    assert torch.equal(spread(masked, (7, 9), halo), torch.tensor(token_mask(pixels, 4, halo)).reshape(-1, 1))


@pytest.mark.parametrize("num_prompt", [0, 3, 32, 40])
@pytest.mark.parametrize("num_inside", [1, 31, 32, 33, 900, 1023, 1024])
def test_padded_lists_have_room_for_all_tokens(num_inside: int, num_prompt: int) -> None:
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(0))
    tokens = JobTokens(1024, order[:num_inside], order[num_inside:], (40,), (torch.empty(1064, 2),), num_prompt)
    padded = tokens.padded(reads_padding=True)
    assert padded.inside[:num_inside].equal(tokens.inside)
    assert padded.rest[: len(tokens.rest)].equal(tokens.rest)
    assert set(padded.inside.tolist()) == set(tokens.inside.tolist())
    assert num_inside <= len(padded.inside) <= bucket(num_inside, 1024) == len(tokens.padded().inside)

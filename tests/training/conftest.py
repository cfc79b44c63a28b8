"""Photographs to train on, made up."""

import pytest
import torch
from torch import Generator

from instgenie.bench.photos import Photos


@pytest.fixture
def photos() -> Photos:
    generator = Generator().manual_seed(0)
    outlines = torch.zeros(8, 256, 256, dtype=torch.bool)
    outlines[:4, 80:180, 60:200] = True  # the first four are pets
    return Photos(
        pictures=torch.randint(0, 256, (8, 3, 256, 256), generator=generator, dtype=torch.uint8),
        outlines=outlines,
        captions=["a photo of a Siamese cat"] * 4 + ["a photo of a rose"] * 2 + ["a photo of a red hat"] * 2,
        labels=["Siamese"] * 4 + ["rose"] * 2 + ["hat"] * 2,
        species=["cat"] * 4 + ["flower"] * 2 + ["clothing"] * 2,
        colours=[""] * 6 + ["red"] * 2,
        ids=list("abcdefgh"),
    )

"""Masks of a given ratio: as large as asked, of the shape they are named for."""

import numpy as np
import pytest

from instgenie.bench.masks import box_field, mask_of_ratio, outline_field, stroke_field, token_share
from instgenie.types import PixelMask

SIZE = 256, 256
PATCH = 16


def disc(radius: float) -> PixelMask:
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    return np.asarray(np.hypot(y - 120, x - 140) < radius)


@pytest.mark.parametrize("ratio", [0.05, 0.11, 0.2, 0.35, 0.5])
@pytest.mark.parametrize("kind", ["outline", "box", "stroke"])
def test_a_mask_comes_near_its_ratio(kind: str, ratio: float) -> None:
    generator = np.random.default_rng(3)
    field = {
        "outline": lambda: outline_field(disc(60)),
        "box": lambda: box_field(SIZE, generator),
        "stroke": lambda: stroke_field(SIZE, ratio, generator),
    }[kind]()
    mask = mask_of_ratio(field, ratio, PATCH)
    assert token_share(mask, PATCH) == pytest.approx(ratio, abs=0.03)
    assert mask.mean() > ratio / 8


def test_outlines_grow_and_shrink_around_what_they_outline() -> None:
    outline = disc(60)
    small, large = (mask_of_ratio(outline_field(outline), ratio, PATCH) for ratio in (0.1, 0.4))
    assert (outline | ~small).all()
    assert (large | ~outline).all()


def test_a_box_is_a_box() -> None:
    mask = mask_of_ratio(box_field(SIZE, np.random.default_rng(0)), 0.2, PATCH)
    rows, columns = mask.any(1), mask.any(0)
    assert (mask == rows[:, None] & columns).all()


def test_no_ratio_is_too_small() -> None:
    assert mask_of_ratio(box_field(SIZE, np.random.default_rng(0)), 0.0, PATCH).any()

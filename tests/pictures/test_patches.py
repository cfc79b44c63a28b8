"""Texture goes on into a hole, and is taken from whole patches alone."""

import numpy as np
import pytest

from instgenie.pictures.mask import box_mask
from instgenie.pictures.patches import LEAST_PATCHES, SIDE, can_search, copy_sizes, textured, trust
from instgenie.types import PixelMask, Pixels

HOLE: PixelMask = box_mask((28, 20, 30, 24), (64, 96))


def stripes(axis: int) -> Pixels:
    lines = 255 * (np.arange(HOLE.shape[axis]) // 4 % 2).astype(np.uint8)
    picture = np.broadcast_to(lines[:, None] if axis == 0 else lines, HOLE.shape)
    return np.repeat(picture[..., None], 3, axis=2)


def holed(picture: Pixels) -> Pixels:
    return np.where(HOLE[..., None], np.uint8(128), picture)


@pytest.mark.parametrize("axis", [0, 1])
def test_stripes_go_on(axis: int) -> None:
    photo = stripes(axis)
    made = textured(holed(photo), HOLE)
    assert np.array_equal(made[~HOLE], photo[~HOLE])
    wrong = np.abs(made.astype(int) - photo)[HOLE].mean()
    assert wrong < 20  # grey is 127 off


def test_every_pixel_that_is_made_up_resembles_some_that_is_known() -> None:
    random = np.random.default_rng(0)
    photo = np.where(random.random(HOLE.shape)[..., None] < 0.5, np.uint8((250, 10, 10)), np.uint8((20, 200, 30)))
    made = textured(holed(photo), HOLE)[HOLE].astype(int)
    assert (made[:, 2] <= 30).all()
    assert np.array_equal(made, textured(holed(photo), HOLE)[HOLE])


def test_without_whole_patches_colours_stay() -> None:
    photo, hole = stripes(0), np.ones(HOLE.shape, np.bool_)
    hole[:, :SIDE] = False
    hole[SIDE + LEAST_PATCHES - 2 :, :SIDE] = True
    assert not can_search(~hole)
    assert np.array_equal(textured(photo, hole), photo)
    hole[SIDE + LEAST_PATCHES - 2, :SIDE] = False
    assert can_search(~hole)


def test_copies_become_twice_as_large() -> None:
    assert copy_sizes((20, 24)) == [(20, 24)]
    assert copy_sizes((128, 100)) == [(16, 12), (32, 25), (64, 50), (128, 100)]
    assert copy_sizes((100, 1)) == [(12, 1), (25, 1), (50, 1), (100, 1)]


def test_trust_fades_with_every_pixel() -> None:
    values = trust(np.array([[True, False, False, False]]))[0]
    assert values[0] == 1
    assert np.allclose(values[1:-1] / values[2:], 1.25)

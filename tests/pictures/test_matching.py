"""Edits put back into photographs: nothing outside the mask changes; tones and grain go on inside."""

import numpy as np
import pytest
from helpers.profiles import wide_profile

from instgenie.pictures.compositing import paint, whole_picture
from instgenie.pictures.mask import box_mask
from instgenie.pictures.matching import blurred
from instgenie.types import Box, OwnPixels, PixelMask, Source, Whole

SIZE, BOX = (240, 260), Box(range(40, 232), range(20, 212))  # a crop of 192x192
MASK: PixelMask = box_mask((50, 60, 90, 80), (192, 192))
WHERE = slice(BOX.rows.start, BOX.rows.stop), slice(BOX.cols.start, BOX.cols.stop)


def grainy(level: int, sigma: float, channels: int = 3, seed: int = 0) -> OwnPixels:
    noise = np.random.default_rng(seed).normal(level, sigma, (*SIZE, channels))
    return np.rint(np.clip(noise, 0, 255)).astype(np.uint8)


def painted(photo: OwnPixels, level: int, side: int, seed: int = 5, feather: int = 0) -> OwnPixels:
    """A photograph after an edit that painted everything in one grey."""
    return paint(Whole(photo, None, BOX), np.full((side, side, 3), level, np.uint8), MASK, feather, seed)


def fine(pixels: OwnPixels) -> float:
    """The strength of the finest band."""
    values = pixels.astype(np.float32)
    return float((values - blurred(values, 1, 1)).std())


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("profile", [b"", wide_profile()], ids=["srgb", "wide"])
@pytest.mark.parametrize("feather", [0, 7])
def test_outside_the_mask_every_bit_stays(channels: int, profile: bytes, feather: int) -> None:
    own = np.random.default_rng(channels).integers(0, 256, (*SIZE, channels), np.uint8)
    source = Source(own, profile)
    edited = np.random.default_rng(9).integers(0, 256, (64, 64, 3), np.uint8)
    result = paint(Whole(own, source, BOX), edited, MASK, feather, 3)
    masked = np.zeros(SIZE, np.bool_)
    masked[WHERE] = MASK
    assert np.array_equal(result[~masked], own[~masked])
    assert (result[masked] != own[masked]).any()
    if own.shape[2] == 4 and not feather:
        assert (result[masked][:, 3] == 255).all()


def test_an_upscaled_edit_gets_the_grain_of_the_photograph() -> None:
    photo = grainy(120, 9)
    inside = painted(photo, 120, side=64)[WHERE][64:136, 54:136]
    assert fine(inside) == pytest.approx(fine(photo), rel=0.25)
    plain = grainy(120, 0)
    assert fine(painted(plain, 120, side=64)[WHERE][64:136, 54:136]) == 0  # where there is no grain, none is added


def test_an_edit_at_the_resolution_of_the_photograph_gets_no_grain() -> None:
    inside = painted(grainy(120, 9), 120, side=192)[WHERE][90:110, 80:110]
    assert fine(inside) < 1


def test_a_texture_beside_the_mask_is_not_taken_for_grain() -> None:
    photo = grainy(120, 0)
    photo[::2, :110] = 0  # lines beside one half of the mask
    inside = painted(photo, 120, side=64)[WHERE][64:136, 54:136]
    assert fine(inside) < 0.2 * fine(photo)


def test_grain_depends_on_the_seed_alone() -> None:
    photo = grainy(120, 9)
    one, again, other = (painted(photo, 120, side=64, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_tones_meet_at_the_edge_and_fade_inside() -> None:
    """The model makes its surroundings ten levels too dark: the edit is as dark in its middle, not at its edge."""
    result = painted(grainy(120, 0), 110, side=192)[WHERE].astype(int)
    assert abs(int(result[100, 51, 0]) - 120) <= 2
    assert abs(int(result[100, 95, 0]) - 110) <= 3
    steps = np.abs(np.diff(result[100, 51:95, 0]))
    assert steps.max() <= 2


@pytest.mark.parametrize("size", [(300, 400), (192, 256), (90, 130)])
def test_a_whole_photograph_is_matched_as_a_crop_is(size: tuple[int, int]) -> None:
    """Larger than the model's size, as large, and smaller; grain is for crops alone."""
    photo, mask = np.full((*size, 3), 120, np.uint8), np.zeros(size, np.bool_)
    mask[size[0] // 4 : size[0] // 2, size[1] // 3 : 2 * size[1] // 3] = True
    result = paint(whole_picture(photo, None), np.full((192, 256, 3), 100, np.uint8), mask, 0, 1).astype(int)
    assert np.array_equal(result[~mask], photo[~mask])
    edge, middle = result[size[0] // 4, size[1] // 2, 0], result[3 * size[0] // 8, size[1] // 2, 0]
    assert abs(edge - 120) <= 5
    assert middle < edge - 8


@pytest.mark.parametrize("size", [(20, 500), (57, 58), (60, 49), (200, 800), (1, 40), (3, 5)])
def test_a_shift_of_all_tones_is_found_again_along_the_edge(size: tuple[int, int]) -> None:
    """Sides that are scaled differently, and small photographs."""
    mask = np.zeros(size, np.bool_)
    mask[size[0] // 3 : -(-2 * size[0] // 3), size[1] // 3 : 2 * size[1] // 3] = True
    result = paint(
        whole_picture(np.full((*size, 3), 120, np.uint8), None), np.full((96, 96, 3), 110, np.uint8), mask, 0, 1
    ).astype(int)
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    middle_row, middle_col = rows[len(rows) // 2], cols[len(cols) // 2]
    left, right = result[middle_row, cols[[0, -1]], 0]
    assert abs(left - right) <= 2
    if rows[0] > 0 and rows[-1] < size[0] - 1:
        top, bottom = result[rows[[0, -1]], middle_col, 0]
        assert abs(top - bottom) <= 2
    assert (result >= 110).all()
    assert (result <= 120).all()


def test_what_is_painted_beyond_the_mask_is_no_tone() -> None:
    """A model paints whole tokens: red fills those of the mask, and must not fade at the mask's edge."""
    photo, mask = np.full((256, 256, 3), 120, np.uint8), box_mask((104, 104, 48, 48), (256, 256))
    edited = photo.copy()
    edited[96:160, 96:160] = (220, 30, 30)
    result = paint(whole_picture(photo, None), edited, mask, 0, 1)
    assert np.array_equal(result[mask], edited[mask])


CORNERS = [(0, 0, 20, 20), (236, 0, 20, 9), (100, 0, 20, 256), (31, 50, 1, 1), (0, 0, 256, 255)]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("box", CORNERS)
def test_masks_at_edges_of_a_pixel_and_of_nearly_everything(box: tuple[int, int, int, int], channels: int) -> None:
    random = np.random.default_rng(channels)
    own, mask = random.integers(0, 256, (256, 256, channels), np.uint8), box_mask(box, (256, 256))
    edited = random.integers(0, 256, (64, 64, 1 if channels < 3 else 3), np.uint8)
    result = paint(Whole(own, None, Box(range(256), range(256))), edited, mask, 2, 1)
    assert np.array_equal(result[~mask], own[~mask])
    assert result.shape == own.shape


def test_what_the_model_paints_as_it_is_stays_as_it_paints_it() -> None:
    photo = grainy(120, 30)
    mask = np.zeros(SIZE, np.bool_)
    mask[100:150, 90:170] = True
    edited = np.where(mask[..., None], np.uint8(30), photo)
    assert np.array_equal(paint(whole_picture(photo, None), edited, mask, 0, 1), edited)


def test_without_anything_around_it_an_edit_stays_as_it_is_painted() -> None:
    edited, everything = grainy(120, 30, seed=1), np.ones(SIZE, np.bool_)
    assert np.array_equal(paint(whole_picture(grainy(60, 5), None), edited, everything, 0, 1), edited)


def test_transparent_pixels_have_no_say() -> None:
    own = np.dstack([grainy(120, 0), np.full(SIZE, 255, np.uint8)])
    own[:, :100] = 0  # transparent, and black below
    result = paint(Whole(own, Source(own), BOX), np.full((192, 192, 3), 120, np.uint8), MASK, 0, 1)
    masked = np.zeros(SIZE, np.bool_)
    masked[WHERE] = MASK
    assert np.abs(result[masked][:, :3].astype(int) - 120).max() <= 1

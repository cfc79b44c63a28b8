"""Edits fitted to the size of an answer: pictures keep their shape, and masks stay on them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instgenie.errors import MaskError
from instgenie.pictures.fitting import Fit, fit_photo
from instgenie.pictures.mask import box_mask
from instgenie.pictures.photo import Photo
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import Notes, Source

SIZE = (40, 60)


def photo(size: tuple[int, int] = SIZE) -> Photo:
    own = np.random.default_rng(0).integers(0, 256, (*size, 4), np.uint8)
    return Photo(np.ascontiguousarray(own[..., :3]), Source(own))


def test_a_picture_of_another_shape_is_contained_and_its_borders_are_painted() -> None:
    notes: Notes = []
    mask = box_mask((10, 10, 12, 8), SIZE)
    fitted, found = fit_photo(photo(), mask, (90, 90), "contain", notes)
    assert fitted.pixels.shape == (90, 90, 3)
    assert fitted.source is not None
    assert fitted.source.pixels is not None
    assert np.array_equal(fitted.pixels[15:75], resize_picture(photo().pixels, (60, 90)))
    assert np.array_equal(fitted.source.pixels[15:75], resize_picture(photo().source.pixels, (60, 90)))  # type: ignore[union-attr,arg-type]
    assert np.array_equal(found[15:75], resize_mask(mask, (60, 90)))
    assert found[:15].all()
    assert found[75:].all()
    assert "The picture of 60x40 was scaled to 90x60, and the borders up to 90x90 were painted" in notes[0]


def test_a_picture_of_another_shape_is_cropped_on_request() -> None:
    notes: Notes = []
    mask = box_mask((20, 10, 12, 8), SIZE)
    fitted, found = fit_photo(photo(), mask, (80, 80), "cover", notes)
    assert np.array_equal(fitted.pixels, resize_picture(photo().pixels[:, 10:50], (80, 80)))
    assert np.array_equal(found, resize_mask(mask[:, 10:50], (80, 80)))
    assert "The middle of the picture of 60x40, 40x40, was cut out and scaled to 80x80" in notes[0]


def test_a_mask_that_would_be_cut_off_is_refused() -> None:
    with pytest.raises(MaskError, match="cut off"):
        fit_photo(photo(), box_mask((0, 0, 8, 8), SIZE), (40, 40), "cover", [])


@pytest.mark.parametrize("size", [(80, 120), (20, 30), (27, 40), (40, 60), (101, 151)])
@pytest.mark.parametrize("fit", ["contain", "cover"])
def test_a_size_of_the_same_shape_only_scales(size: tuple[int, int], fit: Fit) -> None:
    notes: Notes = []
    mask = box_mask((10, 10, 12, 8), SIZE)
    fitted, found = fit_photo(photo(), mask, size, fit, notes)
    assert np.array_equal(fitted.pixels, resize_picture(photo().pixels, size))
    assert np.array_equal(found, resize_mask(mask, size))
    assert notes == []


sides = st.integers(16, 200)


@settings(deadline=None, max_examples=50)
@given(sides, sides, sides, sides)
def test_the_contained_picture_keeps_its_shape_up_to_a_pixel(height: int, width: int, tall: int, wide: int) -> None:
    corner = box_mask((0, 0, 1, 1), (height, width))
    fitted, mask = fit_photo(photo((height, width)), corner, (tall, wide), "contain", [])
    assert fitted.pixels.shape == (tall, wide, 3)
    rows, cols = (~mask).any(axis=1).sum(), (~mask).any(axis=0).sum()  # where the picture is; its corner is masked
    factor = min(tall / height, wide / width)
    assert abs(rows - factor * height) <= 1 + factor
    assert abs(cols - factor * width) <= 1 + factor


def test_extreme_shapes_take_no_more_memory_than_the_answer() -> None:
    for size in ((16, 4000), (4000, 16)):
        for fit in ("contain", "cover"):
            fitted, _ = fit_photo(photo(size), np.ones(size, np.bool_), (512, 512), fit, [])  # type: ignore[arg-type]
            assert fitted.pixels.shape == (512, 512, 3)

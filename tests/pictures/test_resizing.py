"""Sizes to work at, and pictures and masks that are resized, against plain arithmetic."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from instgenie.pictures.resizing import resize_mask, resize_part, resize_picture, working_size
from instgenie.types import Box, PixelMask

sides = st.integers(16, 20000)


@settings(deadline=None)
@given(sides, sides, st.sampled_from([(16, 256), (16, 512), (8, 64), (16, 1024)]))
def test_working_size_is_bounded_and_keeps_the_aspect(height: int, width: int, model: tuple[int, int]) -> None:
    patch, own_size = model
    h, w = working_size(height, width, patch, own_size)
    rows, cols = h // patch, w // patch
    max_tokens = (own_size // patch) ** 2
    assert (rows * patch, cols * patch) == (h, w)
    assert min(rows, cols) >= 2
    assert rows * cols <= max_tokens
    assert rows * cols >= 0.55 * max_tokens
    aspect = width / height
    if min(rows, cols) >= 4:
        assert rows * cols >= 0.7 * max_tokens
        assert abs(np.log(w / h / aspect)) < 1 / min(rows, cols)


def test_common_working_sizes() -> None:
    assert working_size(1000, 1000, 16, 256) == (256, 256)
    assert working_size(1080, 1920, 16, 256) == (192, 336)
    assert working_size(4000, 3000, 16, 256) == (288, 224)
    assert working_size(16, 60000, 16, 256) == (32, 2048)
    assert working_size(60000, 16, 16, 256) == (2048, 32)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_resized_part_is_part_of_the_resized_picture(data: st.DataObject) -> None:
    own, size = (data.draw(st.tuples(st.integers(3, 90), st.integers(3, 90))) for _ in range(2))
    sides = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda s: s[0] != s[1]))) for n in size
    ]
    part = Box(*(range(*side) for side in sides))
    rows, cols = np.ogrid[: own[0], : own[1]]
    smooth = np.stack([128 + 100 * np.sin(rows / 9 + cols / (7 + each)) for each in range(3)], axis=2).astype(np.uint8)
    whole = resize_picture(smooth, size)[part.rows.start : part.rows.stop, part.cols.start : part.cols.stop]
    assert np.abs(resize_part(smooth, size, part).astype(int) - whole).max() <= 2


def test_resize_picture_has_the_size_and_the_colour() -> None:
    picture = np.full((30, 50, 3), (10, 100, 200), np.uint8)
    resized = resize_picture(picture, (64, 48))
    assert resized.shape == (64, 48, 3)
    assert (resized == (10, 100, 200)).all()


masks = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12))


@settings(deadline=None)
@given(masks, st.integers(1, 15), st.integers(1, 15))
def test_resized_mask_is_masked_where_any_pixel_under_it_is(mask: PixelMask, height: int, width: int) -> None:
    resized = resize_mask(mask, (height, width))
    rows, cols = mask.shape
    # repeat both to their common grid, where every pixel is inside exactly one of each
    fine = mask.repeat(height, axis=0).repeat(width, axis=1)
    assert np.array_equal(resized, fine.reshape(height, rows, width, cols).any(axis=(1, 3)))

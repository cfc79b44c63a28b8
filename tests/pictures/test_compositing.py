"""Compositing: every bit outside the mask stays, and soft edges are ramps of the distance from the edge."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from instgenie.pictures import compositing
from instgenie.pictures.compositing import EXACT_DISTANCE, composite, edge_distance, weights
from instgenie.pictures.mask import box_mask
from instgenie.pictures.resizing import resize_picture
from instgenie.types import PixelMask, Pixels

masks = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12))


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@settings(deadline=None)
@given(masks, st.integers(0, 6), st.integers(0, 3), st.data())
def test_outside_the_mask_every_bit_stays(mask: PixelMask, feather: int, seed: int, data: st.DataObject) -> None:
    height, width = mask.shape
    original = noise(height, width, seed=seed)
    edited = noise(data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20)), seed=seed + 1)
    result = composite(original, edited, mask, feather)
    assert result.dtype == np.uint8
    assert np.array_equal(result[~mask], original[~mask])
    if feather == 0:
        assert np.array_equal(result[mask], resize_picture(edited, (height, width))[mask])


@settings(deadline=None)
@given(masks, st.integers(1, 8))
def test_edge_distance_is_euclidean(mask: PixelMask, limit: int) -> None:
    ys, xs = np.nonzero(~mask)
    rows, cols = np.indices(mask.shape)
    squared = (rows[..., None] - ys) ** 2 + (cols[..., None] - xs) ** 2
    expected = np.sqrt(squared.min(axis=2, initial=limit**2))
    assert np.allclose(edge_distance(mask, limit), np.where(mask, expected, 0))


def test_feather_is_a_ramp_inside_the_mask() -> None:
    mask = box_mask((10, 0, 20, 40), (40, 40))
    result = composite(np.zeros((40, 40, 3), np.uint8), np.full((40, 40, 3), 100, np.uint8), mask, feather=3)
    assert result[20, 8:15, 0].tolist() == [0, 0, 25, 50, 75, 100, 100]
    assert result[0, 20, 0] == 100  # the picture's border is not an edge


def test_composite_leaves_its_arguments_alone() -> None:
    original, edited = noise(20, 20), noise(20, 20, seed=1)
    composite(original, edited, box_mask((2, 2, 9, 9), (20, 20)), feather=2)
    assert np.array_equal(original, noise(20, 20))
    assert np.array_equal(edited, noise(20, 20, seed=1))


def squared_distance(mask: PixelMask) -> np.ndarray[Any, Any]:
    """Square of the distance of each pixel from the nearest unmasked one, by trying all of them."""
    ys, xs = np.nonzero(~mask)
    rows, cols = np.indices(mask.shape)
    least = np.full(mask.shape, 2**30)
    for y, x in zip(ys, xs, strict=True):
        np.minimum(least, (rows - y) ** 2 + (cols - x) ** 2, out=least)
    return least


SHAPES: dict[str, PixelMask] = {
    "points": np.random.default_rng(3).random((150, 170)) > 0.0005,
    "slanted": np.subtract.outer(np.arange(150) * 2, np.arange(170)) > 30,
    "corner": box_mask((40, 30, 130, 120), (150, 170)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("limit", [17, 40, 90, 257])
def test_far_distances_are_about_right_and_near_ones_exact(name: str, limit: int) -> None:
    mask = SHAPES[name]
    is_edge = ~mask & np.pad(mask, 1)[2:, 1:-1] | ~mask & np.pad(mask, 1)[:-2, 1:-1]
    is_edge |= ~mask & np.pad(mask, 1)[1:-1, 2:] | ~mask & np.pad(mask, 1)[1:-1, :-2]
    expected = np.where(mask, np.minimum(np.sqrt(squared_distance(~is_edge)), limit), 0)
    found = edge_distance(mask, limit)
    is_near = expected < min(limit, EXACT_DISTANCE)
    assert np.allclose(found[is_near], expected[is_near])
    assert np.array_equal(found == 0, ~mask)
    assert np.abs(found - expected).max() <= 0.03 * limit + 0.5
    assert np.abs(found - expected).mean() <= 0.002 * limit


@pytest.mark.parametrize("limit", [40, 257])
def test_distances_are_exact_on_request(limit: int) -> None:
    mask = SHAPES["points"]
    expected = np.where(mask, np.minimum(np.sqrt(squared_distance(mask)), limit), 0)
    assert np.allclose(edge_distance(mask, limit, limit), expected)


class CountingNumpy:
    """Numpy, which counts the numbers that its functions return."""

    def __init__(self) -> None:
        self.num_made = 0

    def __getattr__(self, name: str) -> Any:
        known = getattr(np, name)
        if isinstance(known, type) or not callable(known):
            return known

        def counted(*given: Any, **options: Any) -> Any:
            made = known(*given, **options)
            self.num_made += np.size(made)
            return made

        counted.accumulate = getattr(known, "accumulate", None)  # type: ignore[attr-defined]
        return counted


@pytest.mark.parametrize("shape", ["blob", "points"])
def test_the_work_for_a_pixel_does_not_grow_with_the_feather(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols = np.indices((600, 600))
    mask = (rows - 300) ** 2 + (cols - 300) ** 2 < 290**2 if shape == "blob" else (rows % 500 > 0) | (cols % 500 > 0)
    made = {}
    for feather in (16, 256):
        numpy = CountingNumpy()
        monkeypatch.setattr(compositing, "np", numpy)
        edge_distance(mask, feather + 1)
        made[feather] = numpy.num_made / mask.size
    assert 5 < made[256] < 100
    assert made[256] < 2 * made[16]


@settings(deadline=None)
@given(masks, st.integers(0, 256))
def test_weights_are_zero_outside_and_full_inside_a_hard_mask(mask: PixelMask, feather: int) -> None:
    share = weights(mask, feather)
    assert not share[~mask].any()
    if feather == 0:
        assert (share[mask] == 255).all()

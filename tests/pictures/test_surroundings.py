"""What surrounds a mask goes on into it; the mask's own content has no say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instgenie.errors import MaskError
from instgenie.pictures import surroundings
from instgenie.pictures.mask import box_mask
from instgenie.pictures.patches import textured
from instgenie.pictures.surroundings import RIM, flowed, with_surroundings
from instgenie.types import PixelMask, Pixels

SIZE = (40, 60)
MASK: PixelMask = box_mask((20, 12, 18, 14), SIZE)


def slope(axis: int) -> Pixels:
    """Rows or columns that become lighter one by one."""
    levels = np.arange(SIZE[axis], dtype=np.uint8) * 2
    picture = np.broadcast_to(levels[:, None] if axis == 0 else levels, SIZE)
    return np.repeat(picture[..., None], 3, axis=2)


def noisy(seed: int, size: tuple[int, int] = SIZE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def test_what_a_mask_hides_has_no_say() -> None:
    photo, other = noisy(0), noisy(0)
    other[MASK] = 255
    other[12 - RIM : 26 + RIM, 20 - RIM : 38 + RIM] = 255  # nor has what sticks out of it a little
    assert np.array_equal(with_surroundings(photo, MASK)[MASK], with_surroundings(other, MASK)[MASK])
    assert np.array_equal(with_surroundings(photo, MASK)[~MASK], photo[~MASK])


@pytest.mark.parametrize("size", [(200, 300), (97, 131), (512, 64)])
def test_nor_has_it_in_a_small_copy(size: tuple[int, int]) -> None:
    mask = box_mask((20, 30, 31, 41), size)
    photo = noisy(0, size)
    other = np.where(mask[..., None], np.uint8(255), photo)
    assert np.array_equal(
        with_surroundings(photo, mask), np.where(mask[..., None], with_surroundings(other, mask), photo)
    )


def test_one_colour_goes_on() -> None:
    plain = np.full((*SIZE, 3), (200, 30, 90), np.uint8)
    holed = np.where(MASK[..., None], noisy(1), plain)
    assert np.array_equal(with_surroundings(holed, MASK), plain)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slope_goes_on_as_a_slope(axis: int) -> None:
    photo = slope(axis)
    made = with_surroundings(photo, MASK).astype(int)
    assert np.abs(made - photo)[MASK].mean() < 6  # of levels that differ by 26 to 34 across the mask
    first, *_, last = made[..., 0][MASK].reshape(14, 18).mean(1 - axis)
    assert last - first > 10


def test_two_sides_keep_their_colours() -> None:
    photo = np.zeros((*SIZE, 3), np.uint8)
    photo[:, 29:] = 240
    made = with_surroundings(photo, MASK)[..., 0]
    assert made[12:26, 20:25].mean() < 40
    assert made[12:26, 33:38].mean() > 200


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_colours_lie_between_those_that_are_seen(height: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    mask: PixelMask = random.random((height, width)) < random.random()
    photo = noisy(seed, (height, width))
    if mask.all():
        with pytest.raises(MaskError, match="no surroundings"):
            with_surroundings(photo, mask)
        return
    made, seen = with_surroundings(photo, mask), photo[~mask]
    assert np.array_equal(made[~mask], seen)
    assert (made[mask] >= seen.min(0)).all()
    assert (made[mask] <= seen.max(0)).all()


def test_known_pixels_stay_and_means_count_each_once() -> None:
    weights = np.zeros((4, 4, 1))
    weights[0, 0], weights[3, 3] = 1, 1
    values = np.zeros_like(weights)
    values[0, 0], values[3, 3] = 10, 30
    made = flowed(values, weights)
    assert (made[0, 0, 0], made[3, 3, 0]) == (10, 30)
    assert np.isclose(made[0, 3, 0], 20)


def test_nothing_is_searched_in_a_large_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the small copy shows nothing of what is unmasked: it would take minutes."""
    sizes: list[tuple[int, ...]] = []

    def seen(picture: Pixels, hole: PixelMask) -> Pixels:
        sizes.append(hole.shape)
        return textured(picture, hole)

    monkeypatch.setattr(surroundings, "textured", seen)
    for border in (15, 40):
        mask: PixelMask = np.zeros((1024, 1024), np.bool_)
        mask[border:-border, border:-border] = True
        with_surroundings(noisy(0, (1024, 1024)), mask)
    assert sizes == [(64, 64)]


def test_a_single_unmasked_pixel_of_a_large_picture_is_found() -> None:
    mask: PixelMask = np.ones((600, 900), np.bool_)
    mask[300, 500] = False
    photo = noisy(3, (600, 900))
    assert (with_surroundings(photo, mask)[mask] == photo[300, 500]).all()


def test_a_large_picture_is_continued_in_a_small_copy() -> None:
    photo = np.repeat(np.repeat(slope(1), 10, 0), 10, 1)
    mask = np.repeat(np.repeat(MASK, 10, 0), 10, 1)
    made = with_surroundings(photo, mask)
    assert np.array_equal(made[~mask], photo[~mask])
    assert np.abs(made.astype(int) - photo)[mask].mean() < 6

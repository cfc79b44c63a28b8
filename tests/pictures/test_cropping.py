"""The choice of a crop: it contains the mask, gives it more pixels, and is the same for masks that differ slightly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instgenie.pictures.cropping import MIN_GAIN, Canvas, choose_box, crop_edit, describe_crop
from instgenie.pictures.mask import box_mask
from instgenie.pictures.resizing import working_size
from instgenie.types import Box, Edit, Notes, PixelMask, Source

CANVAS = Canvas(16, 256)
PHOTO = (3000, 4000)


def square(x: int, y: int, side: int, size: tuple[int, int] = PHOTO) -> PixelMask:
    return box_mask((x, y, side, side), size)


def contains(box: Box, mask: PixelMask) -> bool:
    rows, cols = (slice(side.start, side.stop) for side in box)
    return int(mask[rows, cols].sum()) == int(mask.sum())


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(40, 700), st.integers(40, 700)),
    corner=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
    part=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)),
    own_size=st.sampled_from([64, 128]),
    padding=st.none() | st.integers(0, 200),
)
def test_a_crop_contains_the_mask_and_its_padding(
    size: tuple[int, int],
    corner: tuple[float, float],
    part: tuple[float, float],
    own_size: int,
    padding: int | None,
) -> None:
    top, left = (int(share * length) for share, length in zip(corner, size, strict=True))
    height, width = (max(int(share * length), 1) for share, length in zip(part, size, strict=True))
    mask = np.zeros(size, np.bool_)
    mask[top : top + height, left : left + width] = True
    canvas = Canvas(16, own_size)
    for mode in ("auto", "masked"):
        box = choose_box(mask, canvas, mode, padding)
        if box is None:
            continue
        assert contains(box, mask)
        for side, lines, length in zip(box, (mask.any(axis=1), mask.any(axis=0)), size, strict=True):
            assert 0 <= side.start < side.stop <= length
            masked = np.flatnonzero(lines)
            around = max(padding or 0, 1)
            assert side.start <= max(masked[0] - around, 0)
            assert side.stop >= min(masked[-1] + 1 + around, length)
        assert choose_box(mask, canvas, mode, padding) == box
        if mode == "auto":
            assert canvas.scale(size) / canvas.scale(box.size) >= MIN_GAIN


def test_a_small_mask_is_edited_at_the_resolution_of_the_photograph() -> None:
    box = choose_box(square(1700, 900, 100), CANVAS, "auto")
    assert box
    assert box.size == (256, 256) == working_size(*box.size, 16, 256)


def test_a_wide_mask_gets_a_wide_crop() -> None:
    box = choose_box(box_mask((500, 800, 1200, 300), PHOTO), CANVAS, "auto")
    assert box
    height, width = box.size
    assert width > 1.8 * height


def test_slightly_different_masks_share_a_crop() -> None:
    rng = np.random.default_rng(0)
    num_shared = num_pairs = 0
    for _ in range(40):
        x, y, side = (int(rng.integers(low, high)) for low, high in ((300, 3000), (300, 2000), (60, 600)))
        moved = (side * rng.uniform(-0.05, 0.05, 2)).astype(int)
        one = choose_box(square(x, y, side), CANVAS, "auto")
        other = choose_box(square(x + moved[0], y + moved[1], round(side * rng.uniform(0.95, 1.05))), CANVAS, "auto")
        num_pairs += 1
        num_shared += one == other
    assert num_shared >= 0.5 * num_pairs


@pytest.mark.parametrize(
    ("mask", "mode"),
    [
        (square(1700, 900, 100), "off"),
        (square(100, 100, 2400), "auto"),  # nothing to gain
        (square(20, 20, 30, (200, 200)), "auto"),  # the model sees every pixel anyway
        (np.ones(PHOTO, np.bool_), "masked"),  # no room
    ],
)
def test_the_whole_picture_is_edited(mask: PixelMask, mode: str) -> None:
    assert choose_box(mask, CANVAS, mode) is None  # type: ignore[arg-type]


def test_a_crop_that_is_asked_for_is_made_whatever_it_gains() -> None:
    assert choose_box(square(100, 100, 1900), CANVAS, "masked")
    assert choose_box(square(20, 20, 30, (300, 300)), CANVAS, "masked")


def test_more_padding_makes_a_larger_crop() -> None:
    sizes = [choose_box(square(1700, 900, 200), CANVAS, "masked", padding) for padding in (0, 300, 900)]
    areas = [box.size[0] * box.size[1] for box in sizes if box]
    assert areas == sorted(set(areas))
    assert len(areas) == 3


def test_a_crop_has_the_shape_of_a_working_size_that_is_given() -> None:
    box = choose_box(square(1700, 900, 300), Canvas(16, 256, (128, 384)), "auto")
    assert box
    assert box.size[1] == pytest.approx(3 * box.size[0], abs=2)


def test_the_edit_of_a_crop_keeps_the_rest_for_the_answer() -> None:
    own = np.random.default_rng(0).integers(0, 256, (300, 400, 4), np.uint8)
    edit = Edit(own[..., :3].copy(), square(200, 100, 20, (300, 400)), "a cat", feather=3, source=Source(own))
    box = Box(range(50, 178), range(150, 278))
    part = crop_edit(edit, box)
    assert part.picture.flags.owndata  # the photograph is not kept alive by its template
    assert np.array_equal(part.picture, edit.picture[50:178, 150:278])
    assert np.array_equal(part.mask, edit.mask[50:178, 150:278])
    assert (part.feather, part.source) == (3, None)
    assert part.whole
    assert part.whole.pixels is own


def test_notes_say_what_was_edited() -> None:
    box = Box(range(50, 178), range(150, 278))
    notes: Notes = []
    describe_crop(box, PHOTO, "auto", "", notes)
    describe_crop(box, PHOTO, "auto", "the request names a template", notes)
    describe_crop(None, PHOTO, "masked", "", notes)
    describe_crop(None, PHOTO, "auto", "", notes)
    assert len(notes) == 3
    assert "A crop of 128x128 around the mask was edited, at 150,50 of the picture of 4000x3000" in notes[0]
    assert "The whole picture was edited, because the request names a template" in notes[1]
    assert "no room" in notes[2]

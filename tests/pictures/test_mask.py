"""Masks read from files and boxes, and the tokens they cover, against plain loops."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from instgenie.errors import MaskError
from instgenie.pictures.mask import box_mask, check_mask, read_mask, token_mask
from instgenie.types import PixelMask

SIZE = (24, 40)


def some_mask() -> PixelMask:
    return box_mask((3, 5, 20, 7), SIZE)


def alpha_picture(mask: PixelMask) -> Image.Image:
    pixels = np.full((*mask.shape, 4), 200, np.uint8)
    pixels[..., 3] = np.where(mask, 0, 255)
    return Image.fromarray(pixels)


@st.composite
def patched_masks(draw: st.DrawFn) -> tuple[PixelMask, int]:
    patch, rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return draw(hnp.arrays(np.bool_, (rows * patch, cols * patch))), patch


@settings(deadline=None)
@given(patched_masks(), st.integers(0, 7))
def test_a_token_is_masked_if_any_pixel_near_it_is(masked: tuple[PixelMask, int], halo: int) -> None:
    mask, patch = masked
    tokens = token_mask(mask, patch, halo)
    assert tokens.shape == (mask.shape[0] // patch, mask.shape[1] // patch)
    for row, col in np.ndindex(tokens.shape):
        rows = slice(max(row - halo, 0) * patch, (row + halo + 1) * patch)
        cols = slice(max(col - halo, 0) * patch, (col + halo + 1) * patch)
        assert tokens[row, col] == mask[rows, cols].any()


def test_token_mask_leaves_its_argument_alone() -> None:
    mask = some_mask()
    token_mask(mask, 1, halo=2)
    assert np.array_equal(mask, some_mask())


def test_alpha_zero_is_masked(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    alpha_picture(some_mask()).save(path)
    assert np.array_equal(read_mask(path, SIZE, "alpha"), some_mask())
    assert np.array_equal(read_mask(path.read_bytes(), SIZE, "alpha"), some_mask())


def test_only_full_transparency_is_masked(tmp_path: Path) -> None:
    pixels = np.array(alpha_picture(some_mask()))
    pixels[0, 0, 3] = 1
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png", SIZE, "alpha"), some_mask())


def test_a_transparent_palette_colour_is_an_alpha_channel(tmp_path: Path) -> None:
    image = Image.fromarray(some_mask().astype(np.uint8))
    image.putpalette([255, 255, 255, 0, 0, 0])
    image.save(tmp_path / "mask.png", transparency=1)
    assert np.array_equal(read_mask(tmp_path / "mask.png", SIZE, "alpha"), some_mask())


def test_luma_of_a_transparent_palette(tmp_path: Path) -> None:
    image = Image.fromarray(some_mask().astype(np.uint8))
    image.putpalette([0, 0, 0, 255, 255, 255])
    image.save(tmp_path / "mask.png", transparency=b"\x80\x40")
    assert np.array_equal(read_mask(tmp_path / "mask.png", SIZE, "luma"), some_mask())


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "I;16"])
def test_luma_white_is_masked(tmp_path: Path, mode: str) -> None:
    grey = np.where(some_mask(), 128, 127)
    if mode == "1":
        image = Image.fromarray(some_mask())
    elif mode == "I;16":
        image = Image.fromarray((grey * 257).astype(np.uint16))
    else:
        image = Image.fromarray(grey.astype(np.uint8)).convert(mode)
    image.save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png", SIZE, "luma"), some_mask())


def test_no_alpha_names_the_luma_mode(tmp_path: Path) -> None:
    Image.new("RGB", (40, 24), "white").save(tmp_path / "mask.png")
    with pytest.raises(MaskError, match=r"no alpha channel.*luma"):
        read_mask(tmp_path / "mask.png", SIZE, "alpha")


def test_another_size_names_both(tmp_path: Path) -> None:
    alpha_picture(np.ones((32, 33), np.bool_)).save(tmp_path / "mask.png")
    with pytest.raises(MaskError, match=r"33x32.*40x24"):
        read_mask(tmp_path / "mask.png", SIZE, "alpha")


@pytest.mark.parametrize(("mode", "reason"), [("alpha", "alpha 0"), ("luma", "white")])
def test_an_empty_file_mask_says_what_was_looked_for(tmp_path: Path, mode: str, reason: str) -> None:
    Image.new("RGBA", (40, 24), "black").save(tmp_path / "mask.png")
    with pytest.raises(MaskError, match=rf"empty.*{reason}"):
        read_mask(tmp_path / "mask.png", SIZE, mode)  # type: ignore[arg-type]


def test_unreadable_files_are_mask_errors(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    encoded = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 4), np.uint8)
    Image.fromarray(noise).save(encoded, "PNG")
    (tmp_path / "cut.png").write_bytes(encoded.getvalue()[:-200])
    for name in ("text.png", "cut.png", "missing.png", "."):
        with pytest.raises(MaskError, match=r"text|cut|missing|not a file"):
            read_mask(tmp_path / name, SIZE, "alpha")


def test_box_is_x_y_width_height() -> None:
    assert np.argwhere(box_mask((3, 5, 2, 1), SIZE)).tolist() == [[5, 3], [5, 4]]
    assert box_mask((0, 0, 40, 24), SIZE).all()


@pytest.mark.parametrize("box", [(0, 0, 0, 5), (0, 0, 5, -1), (-1, 0, 5, 5), (36, 0, 5, 5), (0, 20, 5, 5)])
def test_bad_boxes_are_named(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(MaskError, match=",".join(map(str, box))):
        box_mask(box, SIZE)


def test_check_mask_takes_good_masks_only() -> None:
    check_mask(some_mask(), SIZE)
    with pytest.raises(MaskError, match="empty"):
        check_mask(np.zeros(SIZE, np.bool_), SIZE)
    with pytest.raises(MaskError, match=r"\(24, 40\).*\(24, 41\)"):
        check_mask(some_mask(), (24, 41))
    with pytest.raises(MaskError, match="uint8"):
        check_mask(some_mask().astype(np.uint8), SIZE)  # type: ignore[arg-type]

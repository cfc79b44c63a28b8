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
from instgenie.pictures.mask import MaskMode, box_mask, check_mask, read_mask, token_mask
from instgenie.pictures.photo import open_photo
from instgenie.types import Notes, PixelMask

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


@pytest.mark.parametrize("mode", ["auto", "alpha"])
def test_soft_alpha_is_masked_below_half(tmp_path: Path, mode: MaskMode) -> None:
    pixels = np.array(alpha_picture(some_mask()))
    pixels[..., 3] = np.where(some_mask(), 127, 128)
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png", SIZE, mode), some_mask())


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


@pytest.mark.parametrize(
    ("mode", "reason"), [("auto", "transparent.*white"), ("alpha", "alpha below"), ("luma", "white")]
)
def test_an_empty_file_mask_says_what_was_looked_for(tmp_path: Path, mode: str, reason: str) -> None:
    Image.new("RGBA", (40, 24), "black").save(tmp_path / "mask.png")
    with pytest.raises(MaskError, match=rf"empty.*{reason}"):
        read_mask(tmp_path / "mask.png", SIZE, mode)  # type: ignore[arg-type]


def encode(image: Image.Image, file_format: str = "PNG", orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = io.BytesIO()
    image.save(encoded, file_format, exif=exif.tobytes())
    return encoded.getvalue()


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("RGB", "JPEG"), ("RGBA", "WEBP")],
)
def test_an_opaque_mask_in_black_and_white_is_read_as_luma_and_a_note_says_so(mode: str, file_format: str) -> None:
    notes: Notes = []
    image = Image.fromarray(some_mask()).convert("L").convert(mode)
    assert np.array_equal(read_mask(encode(image, file_format), SIZE, notes=notes), some_mask())
    assert notes == ["The mask has no transparent pixel and is black and white: its white part is edited."]


def test_transparency_comes_before_black_and_white() -> None:
    notes: Notes = []
    image = Image.fromarray(~some_mask()).convert("RGBA")
    image.putalpha(Image.fromarray(~some_mask()).convert("L"))
    assert np.array_equal(read_mask(encode(image), SIZE, notes=notes), some_mask())
    assert notes == []


def test_an_opaque_mask_without_black_masks_nothing() -> None:
    with pytest.raises(MaskError, match="no alpha channel"):
        read_mask(encode(Image.new("RGB", (40, 24), "white")), SIZE)
    with pytest.raises(MaskError, match="empty"):
        read_mask(encode(Image.new("RGBA", (40, 24), "white")), SIZE)


@pytest.mark.parametrize("size", [(25, 40), (24, 41), (23, 40)])
def test_a_mask_that_is_a_pixel_too_long_is_no_scaled_one(size: tuple[int, int]) -> None:
    with pytest.raises(MaskError, match=f"{size[1]}x{size[0]} but the picture is 40x24"):
        read_mask(encode(alpha_picture(np.ones(size, np.bool_))), SIZE)


def test_an_opaque_photograph_is_not_taken_for_a_mask() -> None:
    photograph = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
    with pytest.raises(MaskError, match=r"no transparent pixel.*luma"):
        read_mask(encode(Image.fromarray(photograph)), SIZE)
    almost = np.dstack([photograph, np.full(SIZE, 200, np.uint8)])  # it has an alpha channel, which masks nothing
    with pytest.raises(MaskError, match="empty"):
        read_mask(encode(Image.fromarray(almost)), SIZE)


@pytest.mark.parametrize("factor", [2, 0.5])
def test_another_size_of_the_same_shape_is_scaled(factor: float) -> None:
    notes: Notes = []
    size = (48, 80)
    mask = box_mask((4, 6, 20, 8), size)
    width, height = round(factor * 80), round(factor * 48)
    found = read_mask(encode(alpha_picture(mask).resize((width, height), Image.Resampling.NEAREST)), size, notes=notes)
    assert np.array_equal(found, mask)
    assert notes == [f"The mask was scaled from {width}x{height} to 80x48."]


def test_rounding_does_not_change_a_shape() -> None:
    size = (667, 1001)
    for height, width in ((341, 512), (342, 512), (1334, 2001)):
        assert read_mask(encode(alpha_picture(np.ones((height, width), np.bool_))), size).shape == size
    with pytest.raises(MaskError, match=r"512x345.*1001x667"):
        read_mask(encode(alpha_picture(np.ones((345, 512), np.bool_))), size)


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_mask_as_the_picture_is_stored_is_turned_like_it(orientation: int) -> None:
    stored = some_mask()
    picture = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
    picture[stored] = 0
    photo = open_photo(encode(Image.fromarray(picture), orientation=orientation))
    assert photo.pixels.shape == (40, 24, 3)
    notes: Notes = []
    found = read_mask(encode(alpha_picture(stored)), (40, 24), orientation=photo.orientation, notes=notes)
    assert np.array_equal(found, (photo.pixels == 0).all(axis=2))
    assert notes == ["The mask was turned like the picture, whose pixels are stored on their side."]
    half = alpha_picture(stored).resize((80, 48), Image.Resampling.NEAREST)
    assert np.array_equal(read_mask(encode(half), (40, 24), orientation=photo.orientation), found)


@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
def test_a_mask_with_an_orientation_of_its_own(orientation: int) -> None:
    """A mask that was painted on the stored pixels has the photograph's EXIF; one that was painted on the upright
    picture may have it too, by mistake, which shows in its shape."""
    notes: Notes = []
    upright = (40, 24) if orientation >= 5 else SIZE
    found = read_mask(encode(alpha_picture(some_mask()), orientation=orientation), upright, notes=notes)
    assert np.array_equal(found, open_photo(encode(mask_picture(), orientation=orientation)).pixels[..., 0] == 255)
    assert notes == []
    if orientation >= 5:
        stale = encode(alpha_picture(some_mask()), orientation=orientation)
        assert np.array_equal(read_mask(stale, SIZE, orientation=orientation, notes=notes), some_mask())
        assert "as it is stored" in notes[0]


def mask_picture() -> Image.Image:
    return Image.fromarray(some_mask()).convert("RGB")


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

"""Reading and writing pictures of every kind, good and hostile."""

import io
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from instgenie.errors import EditError, InstGenieError, MaskError, PictureError
from instgenie.pictures.mask import box_mask
from instgenie.pictures.picture import (
    check_edit,
    encode_picture,
    open_picture,
    save_picture,
)
from instgenie.types import Edit, Pixels


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, file_format, **options)
    return encoded.getvalue()


def blank_png(width: int, height: int) -> bytes:
    """A header that announces a huge picture, without data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# opening


@pytest.mark.parametrize(("file_format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_exact_formats_open_exactly(tmp_path: Path, file_format: str, options: dict[str, Any]) -> None:
    data = encode(Image.fromarray(noise(20, 30)), file_format, **options)
    (tmp_path / "picture").write_bytes(data)
    assert np.array_equal(open_picture(data), noise(20, 30))
    assert np.array_equal(open_picture(str(tmp_path / "picture")), noise(20, 30))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_png_mode_becomes_rgb(mode: str) -> None:
    grey = np.where(np.arange(30) % 2, 255, 0).astype(np.uint8)[None].repeat(20, axis=0)
    image = Image.fromarray(grey).convert(mode)
    assert image.mode == mode
    assert np.array_equal(open_picture(encode(image)), grey[..., None].repeat(3, axis=2))


def test_cmyk_jpeg_opens() -> None:
    picture = open_picture(encode(Image.new("CMYK", (30, 20), (0, 255, 255, 0)), "JPEG"))
    assert picture.shape == (20, 30, 3)
    assert picture[..., 0].min() > 200
    assert picture[..., 1:].max() < 60


def test_transparent_parts_are_put_on_white_and_opaque_ones_are_exact() -> None:
    pixels = noise(20, 30, 4)
    pixels[:, :15, 3], pixels[:, 15:, 3] = 255, 0
    picture = open_picture(encode(Image.fromarray(pixels)))
    assert np.array_equal(picture[:, :15], pixels[:, :15, :3])
    assert (picture[:, 15:] == 255).all()


@pytest.mark.parametrize(("file_format", "options"), [("JPEG", {"quality": 95}), ("WEBP", {}), ("PNG", {})])
def test_orientation_of_every_format(file_format: str, options: dict[str, Any]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8  # turn left
    assert open_picture(encode(Image.new("RGB", (30, 20)), file_format, exif=exif.tobytes(), **options)).shape == (
        30,
        20,
        3,
    )


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    picture = open_picture(encode(Image.fromarray(noise(20, 30)), exif=exif.tobytes()))
    assert np.array_equal(picture, np.rot90(noise(20, 30), -1))


def test_broken_exif_does_not_matter() -> None:
    data = encode(Image.fromarray(noise(20, 30)), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert open_picture(data).shape == (20, 30, 3)


@pytest.mark.parametrize("size", [(8001, 8001), (12000, 12000), (60000, 60000)])
def test_huge_pictures_are_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(PictureError, match="too large"):
        open_picture(blank_png(*size))


@pytest.mark.parametrize("size", [(1, 1), (15, 500), (500, 15)])
def test_tiny_pictures_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(PictureError, match=f"too small: {size[0]}x{size[1]}"):
        open_picture(encode(Image.new("RGB", size)))


def hostile_files() -> dict[str, bytes]:
    files = {"empty": b"", "text": b"hello" * 100, "promise": blank_png(100, 100)}
    for file_format in ("PNG", "JPEG", "WEBP"):
        data = encode(Image.fromarray(noise(64, 64)), file_format)
        files[f"cut {file_format}"] = data[: len(data) // 2]
        files[f"only the header of {file_format}"] = data[:40]
    for file_format in ("GIF", "BMP", "TIFF", "PPM"):
        files[file_format] = encode(Image.new("RGB", (64, 64)), file_format)
    return files


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_files_are_picture_errors_that_quote_nothing(name: str) -> None:
    with pytest.raises(PictureError) as caught:
        open_picture(hostile_files()[name])
    assert "0x" not in str(caught.value)
    assert "BytesIO" not in str(caught.value)


@settings(deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    file_format = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP"]))
    damaged = bytearray(encode(Image.fromarray(noise(20, 20)), file_format))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(PictureError):
        assert open_picture(bytes(damaged)).dtype == np.uint8


def test_names_that_are_not_files(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "not a file"), (tmp_path / "missing.png", "no such file"), ("x" * 5000, "reached")):
        with pytest.raises(PictureError, match=reason):
            open_picture(path)


# edits


def an_edit() -> Edit:
    return Edit(picture=noise(20, 30), mask=box_mask((2, 2, 9, 9), (20, 30)), prompt="a red flower")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"seed": 2**63 - 1},
        {"steps": 1, "strength": 0.01},
        {"steps": np.int64(4), "guidance": np.float32(2)},
        {"guidance": 0},
        {"feather": 256},
        {"dense_steps": 1000},
        {"size": (32, 4096)},
        {"prompt": ""},
    ],
)
def test_good_edits_pass(change: dict[str, Any]) -> None:
    check_edit(replace(an_edit(), **change))


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("picture", noise(20, 30, 4), PictureError, r"uint8 \[20, 30, 4\]"),
        ("picture", noise(20, 30).astype(np.float32), PictureError, "float32"),
        ("picture", "photo.png", PictureError, "str"),
        ("picture", noise(15, 30), PictureError, "30x15"),
        ("mask", np.zeros((20, 30), np.bool_), MaskError, "empty"),
        ("mask", np.ones((30, 20), np.bool_), MaskError, r"\(30, 20\)"),
        ("mask", np.ones((20, 30), np.uint8), MaskError, "uint8"),
        ("prompt", "x" * 32001, EditError, "32,001"),
        ("prompt", None, EditError, "NoneType"),
        ("prompt", "caf\udce9", EditError, "character 3"),
        ("negative_prompt", "x" * 32001, EditError, "32,001"),
        ("seed", -1, EditError, "-1"),
        ("seed", 2**63, EditError, "9223372036854775808"),
        ("seed", 1.5, EditError, "1.5"),
        ("steps", 0, EditError, "0.*from 1 to 1000"),
        ("steps", 1001, EditError, "1001"),
        ("steps", True, EditError, "True"),
        ("dense_steps", -1, EditError, "-1.*from 0 to 1000"),
        ("guidance", -0.5, EditError, "-0.5"),
        ("guidance", float("nan"), EditError, "nan"),
        ("guidance", float("inf"), EditError, "inf"),
        ("guidance", "3", EditError, "'3'"),
        ("true_guidance", 101, EditError, "101"),
        ("strength", 0.0, EditError, "0"),
        ("strength", 1.01, EditError, "1.01"),
        ("feather", -1, EditError, "-1"),
        ("feather", 257, EditError, "257"),
        ("size", (250, 256), EditError, "250"),
        ("size", (16, 256), EditError, "16"),
        ("size", (256, 8192), EditError, "8192"),
        ("size", (256,), EditError, "256"),
        ("size", 256, EditError, "256"),
    ],
)
def test_bad_fields_are_typed_errors_with_the_value(
    field: str, value: object, error: type[InstGenieError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_edit(replace(an_edit(), **{field: value}))  # type: ignore[arg-type]


# saving


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".webp"])
def test_exact_suffixes_save_exactly(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    save_picture(noise(20, 30), path)
    assert np.array_equal(open_picture(path), noise(20, 30))
    assert list(tmp_path.iterdir()) == [path]


def test_jpeg_saves_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_text("old")
    save_picture(np.full((20, 30, 3), 90, np.uint8), path)
    assert abs(open_picture(path).astype(int) - 90).max() <= 2


@pytest.mark.parametrize("name", ["picture.gif", "picture", "missing/picture.png", "folder.png", "x" * 300 + ".png"])
def test_bad_targets_are_picture_errors_and_leave_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PictureError, match=r"suffix|folder|saved"):
        save_picture(noise(20, 30), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_sides_too_long_for_a_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="16383"):
        save_picture(np.zeros((16, 16384, 3), np.uint8), tmp_path / "long.webp")
    assert not list(tmp_path.iterdir())


def test_a_quick_png_has_the_same_pixels() -> None:
    picture = np.add.outer(np.arange(64), np.arange(48))[..., None].repeat(3, axis=2).astype(np.uint8)
    usual, quick = (encode_picture(picture, "png", is_quick=is_quick) for is_quick in (False, True))
    assert quick != usual
    assert np.array_equal(np.array(Image.open(io.BytesIO(quick))), picture)

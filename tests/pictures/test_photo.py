"""Files of cameras and painting programs: what the model sees of them, and what an edit keeps."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from helpers.profiles import grey_profile, wide_profile
from PIL import ExifTags, Image, ImageCms

from instgenie.errors import PictureError
from instgenie.pictures.compositing import paint, whole_picture
from instgenie.pictures.mask import box_mask
from instgenie.pictures.photo import Metadata, Photo, open_photo
from instgenie.pictures.picture import encode_picture, open_picture
from instgenie.pictures.profiles import MAX_PROFILE, to_srgb
from instgenie.types import OwnPixels, Pixels

SIZE = (30, 44)
MASK = box_mask((8, 6, 20, 12), SIZE)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LOSSLESS = ["PNG", "WEBP"]


def noise(channels: int = 3, seed: int = 0) -> OwnPixels:
    return np.random.default_rng(seed).integers(0, 256, (*SIZE, channels), np.uint8)


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    if file_format == "WEBP":
        options |= {"lossless": True, "exact": True}
    encoded = io.BytesIO()
    image.save(encoded, file_format, **options)
    return encoded.getvalue()


def edited(photo: Photo, painted: Pixels, file_format: str, feather: int = 0) -> Image.Image:
    """The file that an edit answers with, opened as any program would. Its model paints unmasked pixels as they are."""
    made = np.where(MASK[..., None], painted, photo.pixels)
    result = paint(whole_picture(photo.pixels, photo.source), made, MASK, feather, seed=0)
    return Image.open(io.BytesIO(encode_picture(result, file_format, source=photo.source)))


RED = np.full((*SIZE, 3), (200, 30, 20), np.uint8)


# profiles


@pytest.mark.parametrize("file_format", LOSSLESS)
def test_a_profile_is_kept_and_so_is_every_pixel_outside_the_mask(file_format: str) -> None:
    pale = noise() // 4 + 96  # colours that sRGB has, too
    photo = open_photo(encode(Image.fromarray(pale), file_format, icc_profile=wide_profile()))
    answer = edited(photo, RED, file_format)
    assert answer.info["icc_profile"] == wide_profile()
    assert np.array_equal(np.array(answer)[~MASK], pale[~MASK])
    seen = np.array(to_srgb(answer.convert("RGB"), wide_profile()))  # by a program that knows profiles
    assert np.abs(seen[MASK].astype(int) - RED[MASK]).max() <= 2
    assert np.abs(np.array(answer)[MASK].astype(int) - RED[MASK]).max() > 5


def test_the_model_sees_the_colours_that_the_profile_means() -> None:
    """A red of Display P3 is more red in sRGB; grey is grey in both."""
    red, grey = (
        open_photo(encode(Image.new("RGB", (44, 30), colour), icc_profile=wide_profile())).pixels[0, 0].astype(int)
        for colour in ((200, 100, 100), (128, 128, 128))
    )
    assert red[0] > 205
    assert red[1] < 98
    assert np.abs(grey - 128).max() <= 2


def test_an_srgb_profile_changes_nothing_and_is_kept() -> None:
    photo = open_photo(encode(Image.fromarray(noise()), icc_profile=SRGB))
    assert np.array_equal(photo.pixels, noise())
    assert photo.source is not None
    assert photo.source.pixels is None  # nothing is kept twice
    answer = edited(photo, RED, "PNG")
    assert answer.info["icc_profile"] == SRGB
    assert np.array_equal(np.array(answer)[MASK], RED[MASK])


def test_a_picture_without_profile_alpha_or_metadata_has_no_source() -> None:
    for image in (Image.fromarray(noise()), Image.fromarray(noise()[..., 0]), Image.fromarray(noise()).convert("P")):
        assert open_photo(encode(image)).source is None
    opaque = Image.fromarray(noise()).convert("RGBA")
    assert open_photo(encode(opaque)).source is None


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_a_grey_photograph_with_a_profile_stays_grey(file_format: str) -> None:
    photo = open_photo(encode(Image.fromarray(noise()[..., 0]), icc_profile=grey_profile()))
    answer = edited(photo, RED, file_format)
    assert (answer.mode, answer.info["icc_profile"]) == ("L", grey_profile())
    assert "grey too" in photo.notes[0]
    if file_format == "PNG":
        assert np.array_equal(np.array(answer)[~MASK], noise()[~MASK][..., 0])


def test_a_grey_photograph_with_a_profile_as_webp_is_converted() -> None:
    source = encode(Image.fromarray(noise()[..., 0]), icc_profile=grey_profile())
    answer = edited(open_photo(source), RED, "WEBP")
    assert answer.mode == "RGB"
    assert "icc_profile" not in answer.info
    assert np.array_equal(np.array(answer)[~MASK], open_picture(source)[~MASK])


@pytest.mark.parametrize("profile", [b"x", b"x" * 200, wide_profile()[:300], grey_profile(), b"\0" * (MAX_PROFILE + 1)])
def test_broken_and_hostile_profiles_are_ignored_with_a_note(profile: bytes) -> None:
    photo = open_photo(encode(Image.fromarray(noise()), "WEBP", icc_profile=profile))
    assert np.array_equal(photo.pixels, noise())
    assert photo.source is None
    [note] = photo.notes
    assert note.startswith("The picture's colour profile is ignored: ")


def test_damaged_profiles_never_raise() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(wide_profile())
        for place in random.integers(0, len(damaged), 6):
            damaged[place] = random.integers(256)
        photo = open_photo(encode(Image.fromarray(noise()), icc_profile=bytes(damaged)))
        edited(photo, RED, "PNG")


def test_cmyk_is_converted_with_a_note() -> None:
    photo = open_photo(encode(Image.new("CMYK", (44, 30), (0, 255, 255, 0)), "JPEG"))
    assert photo.source is None
    assert photo.pixels[0, 0, 0] > 200
    assert "CMYK" in photo.notes[0]


# alpha


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("profile", [b"", wide_profile()])
@pytest.mark.parametrize("file_format", LOSSLESS)
def test_alpha_outside_the_mask_is_kept_and_what_is_painted_is_opaque(
    mode: str, profile: bytes, file_format: str
) -> None:
    own = noise(4)
    own[:15, :, 3] = 0  # hidden colours are kept too
    image = Image.fromarray(own).convert(mode)
    options = {"icc_profile": profile} if profile and mode == "RGBA" else {}
    answer = edited(open_photo(encode(image, file_format, **options)), RED, file_format)
    assert answer.mode == "RGBA"
    assert answer.info.get("icc_profile", b"") == options.get("icc_profile", b"")
    assert np.array_equal(np.array(answer)[~MASK], np.array(image.convert("RGBA"))[~MASK])
    assert (np.array(answer)[MASK][:, 3] == 255).all()
    if not options:
        assert np.array_equal(np.array(answer)[MASK][:, :3], RED[MASK])


def test_a_transparent_palette_colour_is_kept() -> None:
    indices = np.arange(30 * 44, dtype=np.uint8).reshape(SIZE) % 4
    image = Image.fromarray(indices)
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    data = encode(image, transparency=b"\xff\x80\x00\x20")
    answer = edited(open_photo(data), RED, "PNG")
    expected = Image.open(io.BytesIO(data)).convert("RGBA")
    assert np.array_equal(np.array(answer)[~MASK], np.array(expected)[~MASK])


def test_a_soft_edge_on_transparent_pixels_shows_no_hidden_colour() -> None:
    own = np.zeros((*SIZE, 4), np.uint8)  # transparent black
    answer = np.array(edited(open_photo(encode(Image.fromarray(own))), RED, "PNG", feather=3))
    assert np.array_equal(answer[~MASK], own[~MASK])
    assert np.abs(answer[MASK][:, :3].astype(int) - RED[MASK]).max() <= 1
    assert set(np.unique(answer[MASK][:, 3])) == {64, 128, 191, 255}


def test_a_jpeg_shows_transparent_parts_white() -> None:
    own = noise(4)
    own[..., 3] = 0
    answer = np.array(edited(open_photo(encode(Image.fromarray(own))), RED, "JPEG"))
    assert answer.shape == (*SIZE, 3)
    assert answer[0, 0].min() > 250


# depth and frames


def deep_png(kind: int) -> bytes:
    """A PNG of 16 bits per channel; kinds 0, 2, 4, 6: grey, RGB, grey and alpha, RGBA."""
    num_channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(bytes((1 + 20 * 2 * num_channels) * 20))
    header = struct.pack(">IIBBBBB", 20, 20, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", [0, 2, 4, 6])
def test_sixteen_bits_per_channel_are_refused_with_a_word(kind: int) -> None:
    with pytest.raises(PictureError, match="16 bits per channel, and an edit keeps 8"):
        open_photo(deep_png(kind))


@pytest.mark.parametrize("file_format", LOSSLESS)
def test_the_first_frame_of_an_animation_is_edited_and_a_note_says_so(file_format: str) -> None:
    frames = [Image.fromarray(noise(seed=seed)) for seed in range(3)]
    photo = open_photo(encode(frames[0], file_format, save_all=True, append_images=frames[1:]))
    assert np.array_equal(photo.pixels, noise())
    assert photo.notes == ["The picture is animated: its first frame is edited."]


# metadata


def some_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.Make] = "Maker"
    exif[ExifTags.Base.ImageWidth] = 44
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ExposureTime] = 0.01
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ExifImageWidth] = 44
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (48.0, 51.0, 29.6)
    return exif


@pytest.mark.parametrize("before", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("after", ["PNG", "WEBP", "JPEG"])
def test_exif_is_kept_without_turn_and_place(before: str, after: str) -> None:
    data = encode(Image.fromarray(noise()), before, exif=some_exif().tobytes())
    found = answered_exif(data, after)
    assert found[ExifTags.Base.Make] == "Maker"
    assert found.get_ifd(ExifTags.IFD.Exif) == {ExifTags.Base.ExposureTime: 0.01}
    assert ExifTags.Base.Orientation not in found
    assert ExifTags.Base.ImageWidth not in found
    assert found.get_ifd(ExifTags.IFD.GPSInfo) == {}
    assert ExifTags.IFD.GPSInfo not in found


def test_the_place_is_kept_on_request_and_so_is_nothing() -> None:
    data = encode(Image.fromarray(noise()), exif=some_exif().tobytes())
    assert answered_exif(data, "PNG", "all").get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] == (48, 51, 29.6)
    assert not answered_exif(data, "PNG", "none")


def answered_exif(data: bytes, file_format: str, metadata: Metadata = "safe") -> Image.Exif:
    photo = open_photo(data, metadata=metadata)
    assert photo.pixels.shape == (44, 30, 3)
    answer = encode_picture(photo.pixels, file_format, source=photo.source)
    assert open_picture(answer).shape == (44, 30, 3)  # it is not turned twice
    return Image.open(io.BytesIO(answer)).getexif()


def test_the_thumbnail_goes_because_it_shows_what_the_edit_removed() -> None:
    thumbnail = encode(Image.new("RGB", (16, 16), "blue"), "JPEG")
    entries = struct.pack("<HHHII", 2, 0x0201, 4, 1, 8 + 2 + 12 + 4 + 2 + 24 + 4)
    entries += struct.pack("<HHII", 0x0202, 4, 1, len(thumbnail)) + bytes(4)
    first = struct.pack("<HHHI4s", 1, 0x010F, 2, 4, b"abc\0") + struct.pack("<I", 8 + 2 + 12 + 4)
    data = encode(
        Image.fromarray(noise()), "JPEG", exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + first + entries + thumbnail
    )
    photo = open_photo(data)
    assert photo.source is not None
    assert b"abc" in photo.source.exif
    assert thumbnail[:20] not in photo.source.exif


def test_exif_too_long_for_a_file_is_left_out_with_a_note() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = "x" * 70_000
    photo = open_photo(encode(Image.fromarray(noise()), "PNG", exif=exif.tobytes()))
    assert photo.source is None
    assert "70," in photo.notes[0]

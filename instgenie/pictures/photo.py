"""Opens a picture file for an edit: sRGB pixels for the model, and what the answer must keep of the file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image

from instgenie.errors import PictureError
from instgenie.pictures.decode import MAX_PIXELS, DecodedFile, decode
from instgenie.pictures.profiles import ProfileError, check_way_back, is_srgb, to_srgb
from instgenie.pictures.resizing import as_array
from instgenie.types import Notes, OwnPixels, Pixels, Source

Metadata = Literal["safe", "all", "none"]  # EXIF that an answer keeps: all but the place, all, nothing

MAX_EXIF = 60_000  # bytes; a JPEG has room for 65,533
STALE = (ExifTags.Base.Orientation, ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength)
STALE_INSIDE = (ExifTags.Base.ExifImageWidth, ExifTags.Base.ExifImageHeight)


@dataclass(frozen=True, eq=False)
class Photo:
    """An opened picture file."""

    pixels: Pixels  # upright; transparent parts are put on white
    source: Source | None = None  # None: the pixels are all there is
    orientation: int = 1  # of the stored pixels, as in EXIF
    notes: Notes = field(default_factory=list)  # what of the file is not kept, or was read in a way that may surprise


def open_photo(source: str | Path | bytes, max_pixels: int = MAX_PIXELS, metadata: Metadata = "safe") -> Photo:
    """Open a PNG, JPEG or WebP."""
    file = decode(source, PictureError, max_pixels)
    notes: Notes = []
    if file.is_animated:
        notes.append("The picture is animated: its first frame is edited.")
    image = without_opaque_alpha(file.image)
    colours = as_mode(image, image.mode.removesuffix("A"))
    srgb, profile, is_own = _read_colours(colours, file.profile, notes)
    own: OwnPixels | None = None
    if is_own or image.mode in ("LA", "RGBA"):
        own = as_array(image if is_own else _with_alpha_of(image, srgb))
    kept = Source(own, profile, _kept_exif(file, metadata, notes))
    return Photo(
        pixels=np.array(on_white(_with_alpha_of(image, srgb))),
        source=kept if own is not None or kept.profile or kept.exif else None,
        orientation=file.orientation,
        notes=notes,
    )


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)


def without_opaque_alpha(image: Image.Image) -> Image.Image:
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema() == (255, 255):
        return image.convert(image.mode.removesuffix("A"))
    return image


def _read_colours(image: Image.Image, profile: bytes, notes: Notes) -> tuple[Image.Image, bytes, bool]:
    """The image in sRGB, the profile of the answer, and whether the answer has the image's own colours."""
    is_cmyk = image.mode == "CMYK"
    try:
        if not profile or (image.mode == "RGB" and is_srgb(profile)):
            srgb, is_own = as_mode(image, "RGB"), False
        else:
            srgb, is_own = to_srgb(image, profile), not is_cmyk
    except ProfileError as unusable:
        notes.append(f"The picture's colour profile is ignored: {unusable}.")
        srgb, profile, is_own = as_mode(image, "RGB"), b"", False
    if is_cmyk:
        notes.append(
            "The picture has the four colours of a press (CMYK): the answer is sRGB, so all its pixels differ."
        )
        return srgb, b"", False
    if is_own:
        try:
            check_way_back(profile, image.mode)
        except ProfileError:
            notes.append("The picture's colour profile can only be read: the answer is sRGB, so all its pixels differ.")
            return srgb, b"", False
        if image.mode == "L":
            notes.append("The picture has a profile for grey: what is painted is grey too.")
    return srgb, profile, is_own


def _with_alpha_of(image: Image.Image, srgb: Image.Image) -> Image.Image:
    if image.mode not in ("LA", "RGBA"):
        return srgb
    srgb = srgb.copy()
    srgb.putalpha(image.getchannel("A"))
    return srgb


def on_white(image: Image.Image) -> Image.Image:
    """The image without its alpha channel, if it has one: transparent parts are put on white."""
    if image.mode not in ("LA", "RGBA"):
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, as_mode(image, "RGBA")).convert(image.mode.removesuffix("A"))


def _kept_exif(file: DecodedFile, metadata: Metadata, notes: Notes) -> bytes:
    """The EXIF of an answer. The turn is done, sizes may change, and the thumbnail shows what the edit removed."""
    if metadata == "none" or not file.exif:
        return b""
    try:
        exif = Image.Exif()
        exif.load(file.exif.tobytes())  # a copy, without the thumbnail
        inside = exif.get_ifd(ExifTags.IFD.Exif)
        for name in STALE:
            exif.pop(name, None)
        for name in STALE_INSIDE:
            inside.pop(name, None)
        if metadata == "safe":
            exif.get_ifd(ExifTags.IFD.GPSInfo).clear()
            exif.pop(ExifTags.IFD.GPSInfo, None)
        kept = exif.tobytes() if exif else b""
    except Exception:  # Pillow raises anything
        notes.append("The picture's EXIF cannot be read and is left out.")
        return b""
    if len(kept) > MAX_EXIF:
        notes.append(f"The picture's EXIF of {len(kept):,} bytes is left out: at most {MAX_EXIF:,} are kept.")
        return b""
    return kept

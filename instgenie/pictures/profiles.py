"""ICC profiles of pictures: from a file's own colours to sRGB, and back. Profiles come from untrusted files."""

import io

import numpy as np
from PIL import Image, ImageCms

MAX_PROFILE = 4 * 2**20  # bytes; profiles of cameras and screens have some hundreds, of presses up to three million
COLOURS = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK"}  # by Pillow's mode, the name of the colours in a profile
NUM_LEVELS = 9  # of each channel in a test chart


class ProfileError(Exception):
    """A profile that cannot be used."""


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an RGB, L or CMYK image to sRGB."""
    return _convert(image, _open(profile, image.mode), _srgb(), "RGB")


def from_srgb(image: Image.Image, profile: bytes, mode: str) -> Image.Image:
    """Convert an sRGB image to the colours of a profile, RGB or L."""
    return _convert(image, _srgb(), _open(profile, mode), mode)


def is_srgb(profile: bytes) -> bool:
    """True if colours mean what they mean in sRGB, up to rounding."""
    chart = _chart()
    apart = np.asarray(to_srgb(chart, profile)).astype(int) - np.asarray(chart)
    return int(np.abs(apart).max()) <= 1


def check_way_back(profile: bytes, mode: str) -> None:
    """Raise a ProfileError if sRGB cannot be converted to the profile, as is true of those that only read a device."""
    from_srgb(_chart(), profile, mode)


def _chart() -> Image.Image:
    """Colours all over the cube."""
    levels = np.linspace(0, 255, NUM_LEVELS).round().astype(np.uint8)
    return Image.fromarray(np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(NUM_LEVELS, -1, 3))


def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _open(profile: bytes, mode: str) -> ImageCms.ImageCmsProfile:
    if len(profile) > MAX_PROFILE:
        raise ProfileError(f"it has {len(profile):,} bytes, and {MAX_PROFILE:,} are accepted")
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        colours = opened.profile.xcolor_space
    except Exception:  # Pillow raises anything
        raise ProfileError("it is damaged") from None
    if colours != COLOURS[mode]:
        raise ProfileError("it is for other colours than the picture has")
    return opened


def _convert(
    image: Image.Image, before: ImageCms.ImageCmsProfile, after: ImageCms.ImageCmsProfile, mode: str
) -> Image.Image:
    try:
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        transform = ImageCms.buildTransform(before, after, image.mode, mode, intent)
        converted = ImageCms.applyTransform(image, transform)
    except Exception:
        raise ProfileError("its colours cannot be converted") from None
    assert converted is not None
    return converted

"""Opens picture files from untrusted sources. Knows files and Pillow; does not know what the picture is for."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from instgenie.errors import InstGenieError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 64_000_000
MIN_SIDE = 16
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
UNDONE = {6: 8, 8: 6}  # the other turns undo themselves


@dataclass(frozen=True, eq=False)
class DecodedFile:
    """The content of a picture file. The image is upright: L or LA, RGB or RGBA, or CMYK."""

    image: Image.Image
    orientation: int  # of the stored pixels, as in EXIF; 1: they are upright
    profile: bytes  # ICC profile; empty: none
    exif: Image.Exif
    is_animated: bool  # True if the image is the first of several frames

    @property
    def stored(self) -> Image.Image:
        """The image as it is stored."""
        return turned(self.image, UNDONE.get(self.orientation, self.orientation))


def decode(
    source: str | Path | bytes, error: type[InstGenieError], max_pixels: int = MAX_PIXELS, may_be_deep: bool = False
) -> DecodedFile:
    """Decode a file. Any defect of it is raised as `error`, with a message that quotes nothing of Pillow's. Files of 16
    bits per channel are reduced to 8 if they `may_be_deep`, else refused."""
    with checked_image(source, error, max_pixels) as image:
        if not may_be_deep and _is_deep(image):
            raise error(
                f"{_name(source)} has 16 bits per channel, and an edit keeps 8 of them: save it with 8 bits per channel"
            )
        try:
            plain = _plain(image)
        except Exception:
            defect = f"{_name(source)} is damaged or cut short: its {image.format} data cannot be decoded"
            raise error(defect) from None
        exif = _read_exif(image)
        orientation = _orientation(exif)
        profile = image.info.get("icc_profile")
        return DecodedFile(
            image=turned(plain, orientation),
            orientation=orientation,
            profile=profile if isinstance(profile, bytes) else b"",
            exif=exif,
            is_animated=image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1,
        )


def turned(image: Image.Image, orientation: int) -> Image.Image:
    """Turn an image, stored with an orientation as in EXIF, upright."""
    return image if orientation == 1 else image.transpose(TURNS[orientation])


@contextmanager
def checked_image(source: str | Path | bytes, error: type[InstGenieError], max_pixels: int) -> Iterator[Image.Image]:
    """The image of a file whose header is read and whose size is accepted; nothing of it is decoded yet."""
    name = _name(source)
    if not isinstance(source, bytes):
        _check_file(Path(source), error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
        except Image.DecompressionBombError:
            raise error(f"{name} is too large: at most {_limit(max_pixels)} pixels are accepted") from None
        except PermissionError:
            raise error(f"{name} cannot be read: permission denied") from None
        except Exception:  # a hostile header makes Pillow raise anything, with text that may carry addresses
            raise error(f"{name} is not a readable picture: PNG, JPEG or WebP is expected") from None
        with image:
            _check_size(image, name, error, max_pixels)
            yield image


def _name(source: str | Path | bytes) -> str:
    return "the data" if isinstance(source, bytes) else str(source)


def _is_deep(image: Image.Image) -> bool:
    """True for a PNG of 16 bits per channel, which Pillow reduces to 8, except in grey ones."""
    return image.mode.startswith("I") or any("16" in str(tile.args) for tile in getattr(image, "tile", ()))


def _plain(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):  # 16-bit grey
        return Image.fromarray(np.rint(np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        return image.convert("LA" if image.mode in {"1", "L", "LA"} else "RGBA")
    if image.mode == "CMYK":
        return image
    return image.convert("L" if image.mode in {"1", "L"} else "RGB")


def _read_exif(image: Image.Image) -> Image.Exif:
    try:
        return image.getexif()
    except Exception:  # broken metadata does not make a picture unreadable
        return Image.Exif()


def _orientation(exif: Image.Exif) -> int:
    found = exif.get(ExifTags.Base.Orientation, 1)
    return found if isinstance(found, int) and found in TURNS else 1


def _check_file(path: Path, error: type[InstGenieError]) -> None:
    try:
        if path.is_file():
            return
        found = "it is not a file" if path.exists() else "there is no such file"
    except (OSError, ValueError):  # a name that is too long, a folder without permission
        found = "it cannot be reached"
    raise error(f"{path} cannot be read: {found}")


def _check_size(image: Image.Image, name: str, error: type[InstGenieError], max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise error(f"{name} is too large: {width}x{height} pixels; at most {_limit(max_pixels)} are accepted")
    if min(width, height) < MIN_SIDE:
        raise error(f"{name} is too small: {width}x{height} pixels; each side needs at least {MIN_SIDE}")


def _limit(max_pixels: int) -> str:
    return f"{max_pixels:,}" if max_pixels == MAX_PIXELS else f"{max_pixels:,} (the server's option --max-megapixels)"

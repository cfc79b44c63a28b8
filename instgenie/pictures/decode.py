"""Opens picture files from untrusted sources. Knows files and Pillow; does not know what the picture is for."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from instgenie.errors import InstGenieError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 64_000_000
MIN_SIDE = 16


def decode(source: str | Path | bytes, error: type[InstGenieError], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The upright, fully decoded image: L or RGB, or RGBA if the file has any kind of transparency. Any defect of the
    file is raised as `error`, with a message that quotes nothing of Pillow's."""
    with checked_image(source, error, max_pixels) as image:
        try:
            return _upright(_plain(image))
        except Exception:
            defect = f"{_name(source)} is damaged or cut short: its {image.format} data cannot be decoded"
            raise error(defect) from None


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


def _plain(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):  # 16-bit grey
        plain = Image.fromarray(np.rint(np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
        plain.info = image.info
        return plain
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image.convert("L" if image.mode in {"1", "L"} else "RGB")


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken metadata does not make a picture unreadable
        return image


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

"""Masks: read from a file or a box, and turned into masked tokens. Knows pixels and patches; knows no model."""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instgenie.errors import MaskError
from instgenie.pictures.decode import MAX_PIXELS, DecodedFile, decode, turned
from instgenie.types import Notes, PixelMask

MaskMode = Literal["auto", "alpha", "luma"]
LOOKED_FOR: dict[MaskMode, str] = {
    "auto": "no pixel is transparent (alpha below 128) or white",
    "alpha": "no pixel is transparent (alpha below 128)",
    "luma": "no pixel is white (128 or above)",
}


def token_mask(mask: PixelMask, patch: int, halo: int = 0) -> NDArray[np.bool_]:
    """The masked tokens [rows, cols]: a token is masked if any pixel of its patch is, or any token within `halo`."""
    height, width = mask.shape
    assert height % patch == 0, (height, patch)
    assert width % patch == 0, (width, patch)
    tokens = np.asarray(mask.reshape(height // patch, patch, width // patch, patch).any(axis=(1, 3)))
    return dilated(tokens, halo)


def dilated(mask: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Spread True by `reach` places in every direction, diagonals too."""
    return _dilate(_dilate(mask, reach).T, reach).T


def _dilate(tokens: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Spread True by `reach` rows up and down."""
    spread = tokens.copy()
    for shift in range(1, min(reach, len(tokens) - 1) + 1):
        spread[shift:] |= tokens[:-shift]
        spread[:-shift] |= tokens[shift:]
    return spread


def read_mask(
    source: str | Path | bytes,
    size: tuple[int, int],
    mode: MaskMode = "auto",
    max_pixels: int = MAX_PIXELS,
    orientation: int = 1,
    notes: Notes | None = None,
) -> PixelMask:
    """Read the mask of a picture of `size` (height, width), which lies in its file in an `orientation` as in EXIF.

    alpha: less than half is masked. luma: half and more is masked. auto: alpha, or luma if the mask is opaque and black
    and white, so that it can mean nothing else. A mask of another size and the same shape is scaled, and one of the
    shape in which the picture is stored is turned like the picture. Whatever was done is added to `notes`.
    """
    name = "the mask" if isinstance(source, bytes) else f"the mask {source}"
    notes = [] if notes is None else notes
    file = decode(source, MaskError, max_pixels, may_be_deep=True)
    if file.is_animated:
        notes.append("The mask is animated: its first frame is used.")
    image = find_upright(file, size, orientation, name, notes)
    masked = _read_pixels(image, mode, name, notes)
    if masked.shape != size:
        height, width = size
        notes.append(f"The mask was scaled from {image.width}x{image.height} to {width}x{height}.")
        masked = np.array(Image.fromarray(masked).resize((width, height), Image.Resampling.NEAREST))
    if not masked.any():
        raise MaskError(f"{name} is empty: {LOOKED_FOR[mode]}, so there is nothing to edit")
    return masked


def find_upright(file: DecodedFile, size: tuple[int, int], orientation: int, name: str, notes: Notes) -> Image.Image:
    """The mask as it lies on the picture. What its own EXIF says comes first; painting programs copy the photograph's
    EXIF, or lose it, so the pixels as they are stored come next, and then the turn of the photograph."""
    if has_shape(file.image, size):
        return file.image
    if has_shape(file.stored, size):
        notes.append("The mask fits as it is stored, so the turn that its EXIF asks for was left out.")
        return file.stored
    like_picture = turned(file.image, orientation)
    if has_shape(like_picture, size):
        notes.append("The mask was turned like the picture, whose pixels are stored on their side.")
        return like_picture
    height, width = size
    raise MaskError(
        f"{name} is {file.image.width}x{file.image.height} but the picture is {width}x{height}: "
        "a mask of the same size, or of the same shape, is needed"
    )


def has_shape(image: Image.Image, size: tuple[int, int]) -> bool:
    """True if the image has `size`, or is a picture of `size` scaled: then neither side has the same length, and
    rounding moves a side by less than a pixel."""
    height, width = size
    if image.height == height or image.width == width:
        return (image.height, image.width) == size
    return abs(image.width * height - image.height * width) < max(height, width)


def _read_pixels(image: Image.Image, mode: MaskMode, name: str, notes: Notes) -> PixelMask:
    alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
    if mode == "auto":
        mode = "alpha"
        if (alpha is None or alpha.getextrema() == (255, 255)) and is_white_on_black(image, name):
            mode = "luma"
            notes.append("The mask has no transparent pixel and is black and white: its white part is edited.")
    if mode == "luma":
        return np.asarray(image.convert("L")) >= 128
    if alpha is None:
        raise MaskError(
            f"{name} has no alpha channel: "
            "mark what to edit with alpha 0, or use the mask mode luma, where white is edited"
        )
    return np.asarray(alpha) < 128


def is_white_on_black(image: Image.Image, name: str) -> bool:
    """True if an opaque mask has black pixels and white ones; False if it is all white. Raises a MaskError if many
    pixels are neither; soft edges and the noise of a JPEG are few."""
    lines = range(0, image.height, max(image.height // 512, 1))
    pixels = np.asarray(image.convert("RGB"))[lines]
    is_black, is_white = (pixels < 64).all(axis=2), (pixels >= 192).all(axis=2)
    if (is_black | is_white).mean() < 0.8:
        raise MaskError(
            f"{name} has no transparent pixel, and it is not black and white: mark what to edit with alpha 0, "
            "or use the mask mode luma, where white is edited"
        )
    return bool(is_black.any())


def box_mask(box: tuple[int, int, int, int], size: tuple[int, int]) -> PixelMask:
    """The mask of the box (x, y, width, height) in a picture of `size` (height, width)."""
    x, y, w, h = box
    height, width = size
    if w < 1 or h < 1:
        raise MaskError(f"the box {x},{y},{w},{h} is empty: width and height of at least 1 are needed")
    if x < 0 or y < 0 or x + w > width or y + h > height:
        raise MaskError(f"the box {x},{y},{w},{h} reaches outside the picture, which is {width}x{height}")
    mask = np.zeros(size, dtype=np.bool_)
    mask[y : y + h, x : x + w] = True
    return mask


def check_mask(mask: PixelMask, size: tuple[int, int]) -> None:
    """Raise a MaskError unless this is a mask of `size` (height, width) with at least one masked pixel."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        found = mask.dtype if isinstance(mask, np.ndarray) else type(mask).__name__
        raise MaskError(f"the mask is {found}: a bool array [height, width] is expected")
    if mask.shape != size:
        raise MaskError(f"the mask has shape {mask.shape} but the picture has {size} (height, width)")
    if not mask.any():
        raise MaskError(f"the mask is empty: none of its {mask.size:,} pixels is masked, so there is nothing to edit")

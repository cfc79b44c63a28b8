"""Masks: read from a file or a box, and turned into masked tokens. Knows pixels and patches; knows no model."""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from instgenie.errors import MaskError
from instgenie.pictures.decode import MAX_PIXELS, decode
from instgenie.types import PixelMask

MaskMode = Literal["alpha", "luma"]


def token_mask(mask: PixelMask, patch: int, halo: int = 0) -> NDArray[np.bool_]:
    """The masked tokens [rows, cols]: a token is masked if any pixel of its patch is, or any token within `halo`."""
    height, width = mask.shape
    assert height % patch == 0, (height, patch)
    assert width % patch == 0, (width, patch)
    tokens = np.asarray(mask.reshape(height // patch, patch, width // patch, patch).any(axis=(1, 3)))
    return _dilate(_dilate(tokens, halo).T, halo).T


def _dilate(tokens: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Spread True by `reach` rows up and down."""
    spread = tokens.copy()
    for shift in range(1, min(reach, len(tokens) - 1) + 1):
        spread[shift:] |= tokens[:-shift]
        spread[:-shift] |= tokens[shift:]
    return spread


def read_mask(
    source: str | Path | bytes, size: tuple[int, int], mode: MaskMode = "alpha", max_pixels: int = MAX_PIXELS
) -> PixelMask:
    """Read the mask of a picture of `size` (height, width). alpha: 0 is masked; luma: 128 and above is masked."""
    name = "the mask" if isinstance(source, bytes) else f"the mask {source}"
    image = decode(source, MaskError, max_pixels)
    if (image.height, image.width) != size:
        height, width = size
        raise MaskError(
            f"{name} is {image.width}x{image.height} but the picture is {width}x{height}: equal sizes needed"
        )
    if mode == "luma":
        masked = np.asarray(image.convert("L")) >= 128
        expected = "no pixel is white (128 or above)"
    elif image.mode == "RGBA":
        masked = np.asarray(image)[..., 3] == 0
        expected = "no pixel has alpha 0"
    else:
        raise MaskError(
            f"{name} has no alpha channel: "
            "mark what to edit with alpha 0, or use the mask mode luma, where white is edited"
        )
    if not masked.any():
        raise MaskError(f"{name} is empty: {expected}, so there is nothing to edit")
    return masked


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

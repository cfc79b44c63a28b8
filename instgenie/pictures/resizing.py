"""Sizes of pictures: the one a model works at, and how pictures and masks get from one to another. Knows no model."""

import math
from itertools import pairwise

import numpy as np
from PIL import Image

from instgenie.types import Box, OwnPixels, PixelMask


def working_size(height: int, width: int, patch: int, own_size: int) -> tuple[int, int]:
    """The (height, width) the model works at: whole patches, at least two per side, and in all no more than
    `own_size` x `own_size` has. Among these, it is the size that best keeps both the picture's aspect ratio and the
    area of `own_size`."""
    max_tokens = (own_size // patch) ** 2
    assert max_tokens >= 4, (own_size, patch)

    def loss(grid: tuple[int, int]) -> float:
        rows, cols = grid
        stretch = abs(math.log(cols * height / (rows * width)))
        return stretch + math.log(max_tokens / (rows * cols)) / 2

    grids = []
    for rows in range(2, max_tokens // 2 + 1):
        ideal, most = rows * width // height, max_tokens // rows
        grids += [(rows, min(max(cols, 2), most)) for cols in (ideal, ideal + 1)]
    rows, cols = min(grids, key=loss)
    return rows * patch, cols * patch


def resize_picture(picture: OwnPixels, size: tuple[int, int]) -> OwnPixels:
    if picture.shape[:2] == size:
        return picture
    height, width = size
    return as_array(as_image(picture).resize((width, height), Image.Resampling.LANCZOS))


def resize_part(picture: OwnPixels, size: tuple[int, int], part: Box) -> OwnPixels:
    """A part of what `resize_picture` returns, without the work for the rest. Where neighbouring pixels differ much, it
    may be rounded otherwise."""
    image = as_image(picture)
    across, down = image.width / size[1], image.height / size[0]
    box = part.cols.start * across, part.rows.start * down, part.cols.stop * across, part.rows.stop * down
    return as_array(image.resize((len(part.cols), len(part.rows)), Image.Resampling.LANCZOS, box=box))


def as_image(picture: OwnPixels) -> Image.Image:
    return Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)


def as_array(image: Image.Image) -> OwnPixels:
    pixels = np.array(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def resize_mask(mask: PixelMask, size: tuple[int, int]) -> PixelMask:
    """Resize a mask; a pixel of the result is masked if it overlaps any masked pixel of the source."""
    height, width = size
    return _any_under(_any_under(mask, height).T, width).T


def _any_under(mask: PixelMask, num_rows: int) -> PixelMask:
    if len(mask) == num_rows:
        return mask
    # row i covers the source's rows from i * len / num_rows to (i + 1) * len / num_rows, in exact arithmetic
    edges = [i * len(mask) for i in range(num_rows + 1)]
    return np.stack([mask[a // num_rows : -(-b // num_rows)].any(axis=0) for a, b in pairwise(edges)])

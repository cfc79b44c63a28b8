"""Makes up what a picture may show in the place of its masked part, from what is around it: what an edit starts from if
something is to disappear. Knows pixels; knows no model.

Colours flow in from the mask's edge, and then texture is copied. Both are done in a small copy of the picture, because
a model paints over it with noise that leaves only what is coarse.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instgenie.errors import MaskError
from instgenie.pictures.mask import dilated
from instgenie.pictures.patches import textured
from instgenie.pictures.resizing import as_array, as_image, resize_mask, resize_picture
from instgenie.types import PixelMask, Pixels

SIDE = 64  # longest side of the copy, in pixels; twice as many take four times as long
RIM = 1  # pixels of the copy around the mask that are made up, too: things seldom end where their masks do

Values = NDArray[np.float64]  # [height, width, channels]


def with_surroundings(picture: Pixels, mask: PixelMask) -> Pixels:
    """The picture with its masked pixels made up from the others. The same picture and mask give the same pixels."""
    height, width = mask.shape
    if mask.all():
        raise MaskError(f"the mask leaves none of {width}x{height} pixels: there are no surroundings to start from")
    small = shrunk(mask.shape, SIDE)
    hole = resize_mask(mask, small)
    if hole.all():  # the copy shows nothing of what is unmasked
        return coloured(picture, mask)
    made = fill(shrink(picture, small), hole)
    return np.where(mask[..., None], resize_picture(made, mask.shape), picture)


def shrunk(size: tuple[int, ...], side: int) -> tuple[int, int]:
    """The size (height, width), made smaller so that its longer side is at most `side`."""
    scale = min(side / max(size), 1)
    height, width = (max(round(length * scale), 1) for length in size)
    return height, width


def shrink(picture: Pixels, size: tuple[int, int]) -> Pixels:
    """A smaller copy, no pixel of which shows anything beside the pixels that it covers."""
    height, width = size
    return as_array(as_image(picture).resize((width, height), Image.Resampling.BOX))


def fill(picture: Pixels, hole: PixelMask) -> Pixels:
    wider = dilated(hole, RIM)
    return textured(coloured(picture, wider), wider) if not wider.all() else coloured(picture, hole)


def coloured(picture: Pixels, hole: PixelMask) -> Pixels:
    """The picture with smooth colours in its hole."""
    weights = (~hole[..., None]).astype(np.float64)
    made = flowed(picture * weights, weights).round().clip(0, 255).astype(np.uint8)
    return np.where(hole[..., None], made, picture)


def flowed(sums: Values, weights: Values) -> Values:
    """Colours for all pixels, from sums of known colours and their weights from 0 to 1: the less weight a pixel has,
    the more it takes from the square that it lies in, and this from the larger square around it."""
    height, width, _ = weights.shape
    if height == width == 1:
        return sums / weights
    coarse, weight = halved(sums), halved(weights)
    most = np.maximum(weight, 1)
    return sums + (1 - weights) * doubled(flowed(coarse / most, weight / most))[:height, :width]


def halved(values: Values) -> Values:
    """Sums of two by two pixels."""
    height, width, _ = values.shape
    even = np.pad(values, ((0, height % 2), (0, width % 2), (0, 0)))
    rows = even[::2] + even[1::2]
    return np.asarray(rows[:, ::2] + rows[:, 1::2])


def doubled(values: Values) -> Values:
    """Four pixels for each, between which the values change evenly."""
    for axis in (0, 1):
        padded = np.moveaxis(np.pad(values, [(int(i == axis),) * 2 for i in range(3)], mode="edge"), axis, 0)
        before, own, after = padded[:-2], padded[1:-1], padded[2:]
        pairs = np.stack([0.25 * before + 0.75 * own, 0.75 * own + 0.25 * after], 1)
        values = np.moveaxis(pairs.reshape(-1, *own.shape[1:]), 0, axis)
    return values

"""Puts an edited picture back into its original under a mask, with a soft edge if wanted. Knows pixels; knows no file
and no model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instgenie.pictures.fitting import crop
from instgenie.pictures.matching import match_grain, match_tones, ring_width
from instgenie.pictures.profiles import from_srgb
from instgenie.pictures.resizing import as_array, as_image, resize_picture
from instgenie.types import Box, OwnPixels, PixelMask, Pixels, Source, Whole

LANCZOS_REACH = 3  # pixels of the coarser of the two pictures, on each side
EXACT_DISTANCE = 16  # up to this many pixels from its edge, distances in a mask are exact
POINTS_PER_DISTANCE = 32  # farther in, the largest distance spans this many points, and lines join them


def whole_picture(picture: Pixels, source: Source | None) -> Whole:
    """A picture that is edited as a whole. It has the colours and the alpha of its file, if there is one."""
    own = picture if source is None or source.pixels is None else source.pixels
    return Whole(own, source, Box(*(range(length) for length in own.shape[:2])))


def paint(whole: Whole, edited: Pixels, mask: PixelMask, feather: int, seed: int) -> OwnPixels:
    """Put what was edited into its photograph, with tones of what is around the mask. A crop also gets its grain, which
    the seed draws. `mask` is that of the edited part."""
    part = crop(whole.pixels, whole.box)
    read = composited(mask, edited.shape[:2], ring_width(whole.is_cropped))
    matched = match_tones(part, in_colours_of(whole.source, edited), mask, read)
    if not whole.is_cropped:
        return composite(part, matched, mask, feather)
    scale = math.sqrt(mask.size / (edited.shape[0] * edited.shape[1]))
    result = whole.pixels.copy()
    crop(result, whole.box)[:] = composite(part, match_grain(part, matched, mask, scale, seed), mask, feather)
    return result


def in_colours_of(source: Source | None, edited: Pixels) -> OwnPixels:
    """What was painted, in the colours of the file that it is put into."""
    if source is None or source.pixels is None or not source.profile:
        return edited
    mode = "L" if source.pixels.shape[2] <= 2 else "RGB"
    return as_array(from_srgb(Image.fromarray(edited), source.profile, mode))


def composite(original: OwnPixels, edited: OwnPixels, mask: PixelMask, feather: int = 0) -> OwnPixels:
    """The edited picture where masked, opaque, with a soft edge of `feather` pixels inside the mask; elsewhere the
    original, bit for bit."""
    height, width = mask.shape
    share = weights(mask, feather)
    edited = resize_picture(edited, (height, width))
    painted, result = as_image(edited), as_image(original)
    if painted.mode != result.mode:
        painted.putalpha(255)
    result.paste(painted, mask=Image.fromarray(share))
    pixels = as_array(result)
    if feather and result.mode in ("LA", "RGBA"):
        _mix_transparent(pixels, original, edited, share)
    return pixels


def _mix_transparent(pixels: OwnPixels, original: OwnPixels, edited: OwnPixels, share: NDArray[np.uint8]) -> None:
    """Where a transparent pixel and a painted one are mixed, give each colour the weight of what shows of it."""
    mixed = (share > 0) & (share < 255) & (original[..., -1] < 255)
    painted = share[mixed].astype(np.float32)[:, None] / 255
    kept = (1 - painted) * original[mixed][:, -1:] / 255
    colours = (edited[mixed] * painted + original[mixed][:, :-1] * kept) / (painted + kept)
    pixels[mixed, :-1] = np.rint(colours).astype(np.uint8)


def weights(mask: PixelMask, feather: int = 0) -> NDArray[np.uint8]:
    """The share of the edited picture in each pixel, in 255ths: 0 outside the mask, 255 inside, and in between within
    `feather` pixels of its edge."""
    if not feather:
        return mask.astype(np.uint8) * np.uint8(255)
    share = np.zeros(mask.shape, np.uint8)
    for box, distance in _distances(mask, feather + 1, EXACT_DISTANCE):
        distance *= np.float32(255 / (feather + 1))
        share[box] = np.rint(distance, out=distance)
    return share


def composited(mask: PixelMask, size: tuple[int, int], ring: int = 0) -> Box:
    """The box of an edited picture of `size` that `composite` reads: around the mask, with the pixels that resizing
    needs, or at least `ring` pixels."""
    rows, cols = _masked_lines(mask)
    return Box(_read(rows, mask.shape[0], size[0], ring), _read(cols, mask.shape[1], size[1], ring))


def _masked_lines(mask: PixelMask) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows and the columns that have masked pixels."""
    return np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))


def _read(masked: NDArray[np.intp], own_length: int, length: int, ring: int) -> range:
    """The pixels read of a side of `length` pixels that is resized to `own_length`, given the masked pixels there."""
    scale = length / own_length
    around = max(0 if length == own_length else LANCZOS_REACH * max(scale, 1.0) + 1, ring)
    start, stop = masked[0] * scale - around, (masked[-1] + 1) * scale + around
    return range(max(math.floor(start), 0), min(math.ceil(stop), length))


def edge_distance(mask: PixelMask, limit: int, exact: int = EXACT_DISTANCE) -> NDArray[np.float32]:
    """Distance of each masked pixel from the nearest unmasked one, at most `limit`; 0 for unmasked pixels. The border
    of the picture is not an edge.

    Distances up to `exact` are exact. Beyond, they are exact at the points of a lattice and interpolated between them,
    so that the work for a pixel does not grow with the limit.
    """
    distance = np.zeros(mask.shape, np.float32)
    for box, found in _distances(mask, limit, exact):
        distance[box] = found
    return distance


def _distances(mask: PixelMask, limit: int, exact: int) -> Iterator[tuple[tuple[slice, slice], NDArray[np.float32]]]:
    """Boxes that cover all masked pixels, and the distances in them. Few rows at a time stay in a processor's cache."""
    if not mask.any():
        return
    rows, cols = _masked_lines(mask)
    # one pixel around the mask is enough: unmasked pixels beyond it are farther away
    top, left = max(rows[0] - 1, 0), max(cols[0] - 1, 0)
    inside = mask[top : rows[-1] + 2, left : cols[-1] + 2]
    vertical = _vertical_distance(inside, limit)
    points = _distances_at_points(vertical, limit) if limit > exact else None
    height, width = inside.shape
    num_rows = max(2**16 // width, 1)
    for start in range(0, height, num_rows):
        stop = min(start + num_rows, height)
        distance = _near_distance(vertical[start:stop], min(limit, exact))
        if points:
            far = np.maximum(points.between(start, stop), exact)
            np.minimum(distance, far, out=distance)
        np.minimum(distance, limit, out=distance)
        yield (slice(top + start, top + stop), slice(left, left + width)), distance


def _vertical_distance(mask: PixelMask, limit: int) -> NDArray[np.int16]:
    """Distance from the nearest unmasked pixel of the same column, at most `limit`."""
    distance = np.empty(mask.shape, np.int16)
    above = np.full(mask.shape[1], limit, np.int16)
    for line, is_masked in zip(distance, mask, strict=True):
        np.add(above, 1, out=line)
        np.minimum(line, limit, out=line)
        above = np.multiply(line, is_masked, out=line)
    through_below = np.empty_like(above)
    for below, line in pairwise(distance[::-1]):
        np.add(below, 1, out=through_below)
        np.minimum(line, through_below, out=line)
    return distance


def _near_distance(vertical: NDArray[np.int16], reach: int) -> NDArray[np.float32]:
    """Distance from the nearest unmasked pixel. It is exact if less than `reach`, which is small; else it is at least
    that, and infinite if no unmasked pixel is near."""
    height, width = vertical.shape
    farthest = 2 * reach**2  # more than any square below
    dtype = np.int16 if farthest + reach**2 < 2**15 else np.int32
    # rows lie one behind the other with a gap between them, so that one operation shifts all of them
    squared = np.full((height, width + reach), farthest, dtype)
    squared[:, :width] = np.where(vertical < reach, np.square(vertical, dtype=dtype), farthest)
    least = squared.copy()
    every, smallest, shifted = squared.reshape(-1), least.reshape(-1), np.empty(squared.size, dtype)
    for shift in range(1, min(reach, width)):
        np.add(every, shift**2, out=shifted)
        np.minimum(smallest[shift:], shifted[:-shift], out=smallest[shift:])
        np.minimum(smallest[:-shift], shifted[shift:], out=smallest[:-shift])
    roots = np.sqrt(np.arange(farthest + reach**2, dtype=np.float32))
    roots[farthest:] = np.inf
    return np.take(roots, least[:, :width], mode="clip")


@dataclass(frozen=True, eq=False)
class Lattice:
    """Numbers at points that are `step` pixels apart, in both directions."""

    points: Image.Image
    step: int
    width: int  # in pixels

    def between(self, start: int, stop: int) -> NDArray[np.float32]:
        """The numbers at all pixels of some rows, interpolated."""
        box = (0, start / self.step, self.width / self.step, stop / self.step)
        return np.asarray(self.points.resize((self.width, stop - start), Image.Resampling.BILINEAR, box=box))


def _distances_at_points(vertical: NDArray[np.int16], limit: int) -> Lattice:
    """Distances from the nearest unmasked pixel, at most `limit`."""
    height, width = vertical.shape
    step = max(2 * (limit // POINTS_PER_DISTANCE // 2) + 1, 3)  # odd, so that points lie on the middles of pixels
    middle = step // 2
    # the last points may lie outside, up to half a step
    lines = np.minimum(np.arange(middle, height + middle, step), height - 1)
    num_points = -(-width // step)
    squared = np.full((2 * limit + num_points * step, len(lines)), limit**2, np.int32)  # [columns, lines]
    squared[limit : limit + width] = vertical[lines].T.astype(np.int32) ** 2
    least = np.full((num_points, len(lines)), limit**2, np.int32)
    through = np.empty_like(least)
    for shift in range(1 - limit, limit):
        start = limit + middle + shift
        np.add(squared[start : start + num_points * step : step], shift**2, out=through)
        np.minimum(least, through, out=least)
    return Lattice(Image.fromarray(np.sqrt(least.T, dtype=np.float32)), step, width)

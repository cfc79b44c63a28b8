"""Makes what was painted look like the photograph around it: its tones where it meets the photograph and, for crops
that were painted at a lower resolution, the photograph's grain. Changes masked pixels only; knows no model.

Both are measured on the ring, the unmasked pixels around the mask. Tones: the difference between the photograph and
what the model makes of the same pixels is blurred and goes on into the mask, where it fades. Where the two differ much,
the model has painted something, and that is no tone: a model may paint up to a token beyond the mask. Grain: the
photograph's finest bands are measured where they are quietest, because there they are grain and not texture; noise of
the same strength and the same colours fills what the painted part lacks.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from instgenie.pictures.fitting import crop
from instgenie.pictures.resizing import as_array, as_image, resize_mask, resize_part, resize_picture
from instgenie.types import Box, OwnPixels, PixelMask

TONE_RING = 8  # pixels of the model around the mask that are compared with the photograph
GRAIN_RING = 16  # the same around the mask of a crop, where the photograph's grain is measured
CONTENT = 64  # levels of 255: pixels that differ so much have no say in the tones, and those that differ less have less
TONE_STEP = 2  # pixels of the model between the points at which tones are compared
TONE_RADIUS = 2  # points; three box filters of it are nearly a Gaussian of twice the width
FULL_TONE = 0.3  # share of pixels nearby that have a say, from which on the tones are matched in full
GREY = 128  # stands for no change of tone
NATIVE = 1.05  # pixels of the photograph per pixel of the model up to which a crop has the photograph's own grain
MAX_BANDS = 3  # of grain; each is half as fine as the one before
QUIET = 0.3  # share of the ring, its quietest part, that shows the grain

Values = NDArray[np.float32]  # [height, width, channels]


def ring_width(is_cropped: bool) -> int:
    return GRAIN_RING if is_cropped else TONE_RING


def match_tones(photo: OwnPixels, edited: OwnPixels, mask: PixelMask, read: Box) -> OwnPixels:
    """What was painted, at the photograph's size, with tones that go on from the photograph's own into the mask. `read`
    is the part of `edited` that was decoded."""
    painted, size = resize_picture(edited, mask.shape), edited.shape[:2]
    kept = unmasked(photo, mask)
    if not kept.any():
        return painted
    ring = crop(~resize_mask(~kept, size), read)[..., None].astype(np.float32)
    seen = resize_part(colours(photo, edited), size, read).astype(np.float32)
    difference = seen - crop(edited, read)
    ring *= np.clip(1 - np.abs(difference).max(axis=2, keepdims=True) / CONTENT, 0, 1)
    sums = blurred(thinned(np.concatenate([difference * ring, ring], axis=2), TONE_STEP), TONE_RADIUS, 3)
    offset = sums[..., :-1] / np.maximum(sums[..., -1:], np.float32(FULL_TONE))

    sides, lines = [], []  # the same part of the photograph, and where that lies among the points of the offset
    for part, length, own, most in zip(read, size, mask.shape, offset.shape, strict=False):
        side = range(math.ceil(part.start * own / length), math.floor(part.stop * own / length))
        first, last = ((end * length / own - part.start) / TONE_STEP for end in (side.start, side.stop))
        sides.append(side)
        lines.append((max(first, 0.0), min(last, float(most))))
    near = Box(*sides)
    result = painted.copy()
    crop(result, near)[:] = shifted(crop(painted, near), offset, lines)
    return result


def match_grain(photo: OwnPixels, painted: OwnPixels, mask: PixelMask, scale: float, seed: int) -> OwnPixels:
    """What was painted, with grain of the photograph. A pixel of the model covers `scale` of it along each side."""
    kept = unmasked(photo, mask)
    if scale <= NATIVE or not kept.any():
        return painted
    near = around(mask, round(GRAIN_RING * scale))
    inside, outside = (crop(pixels, near).astype(np.float32) for pixels in (painted, colours(photo, painted)))
    inside += grain(outside, inside, crop(mask, near), crop(kept, near), scale, seed)
    result = painted.copy()
    crop(result, near)[:] = np.rint(np.clip(inside, 0, 255))
    return result


def unmasked(photo: OwnPixels, mask: PixelMask) -> PixelMask:
    """The pixels around the mask that can be seen."""
    return ~mask & (photo[..., -1] == 255) if photo.shape[2] in (2, 4) else ~mask


def colours(photo: OwnPixels, painted: OwnPixels) -> OwnPixels:
    """A photograph without its alpha."""
    return np.ascontiguousarray(photo[..., : painted.shape[2]])


def thinned(values: Values, step: int) -> Values:
    """The means over squares of `step` pixels; values beyond the border are those at it."""
    height, width, channels = values.shape
    padded = np.pad(values, [(0, -height % step), (0, -width % step), (0, 0)], mode="edge")
    means: Values = padded.reshape(-(-height // step), step, -(-width // step), step, channels).mean(axis=(1, 3))
    return means


def shifted(pixels: OwnPixels, offset: NDArray[np.floating], lines: list[tuple[float, float]]) -> OwnPixels:
    """Pixels with an offset added: the part of it between two rows and two columns, which need not be whole numbers."""
    (top, bottom), (left, right) = lines
    around_grey = as_image(np.rint(np.clip(GREY + offset, 0, 255)).astype(np.uint8))
    size = pixels.shape[1], pixels.shape[0]
    tones = around_grey.resize(size, Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    return as_array(ImageChops.add(as_image(pixels), tones, 1, -GREY))


def grain(
    photo: Values, painted: Values, mask: PixelMask, ring: PixelMask, scale: float, seed: int
) -> Values:  # as `painted`
    """The noise that the painted part lacks, in the bands that are finer than what the model can paint."""
    noise = np.random.default_rng(seed).standard_normal(painted.shape, np.float32)
    added = np.zeros_like(painted)
    num_bands = min(max(round(math.log2(scale)), 1), MAX_BANDS)
    for band in range(num_bands):
        radius = 2**band
        photo, fine = split(photo, radius)
        painted, own = split(painted, radius)
        noise, white = split(noise, radius)
        wanted, there = covariance(fine, ring, radius), covariance(own, mask, radius)
        lacking = 1 - np.trace(there) / max(float(np.trace(wanted)), 1e-6)
        if lacking > 0:
            shaped = white / max(float(white.std()), 1e-6) @ root(wanted).T
            added += np.float32(math.sqrt(lacking)) * shaped
    return added


def split(values: Values, radius: int) -> tuple[Values, Values]:
    """The values without their finest band, and that band."""
    coarse = blurred(values, radius, 1)
    return coarse, values - coarse


def covariance(band: Values, where: PixelMask, radius: int) -> NDArray[np.float64]:  # [channels, channels]
    """The covariance of the channels of a band in the quietest part of some pixels."""
    channels = band.shape[2]
    if not where.any():
        return np.zeros((channels, channels))
    energy = blurred(np.square(band).sum(axis=2, keepdims=True), 4 * radius, 1)[..., 0]
    found = band[where & (energy <= np.quantile(energy[where], QUIET))].astype(np.float64)
    return found.T @ found / len(found)


def root(matrix: NDArray[np.float64]) -> Values:
    """The symmetric root of a covariance."""
    values, vectors = np.linalg.eigh(matrix)
    made: Values = (vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T).astype(np.float32)
    return made


def blurred(values: Values, radius: int, times: int) -> Values:
    """Box filters over both axes. Values beyond the border are those at it."""
    for _ in range(times):
        for axis in (0, 1):
            width = 2 * radius + 1
            sides = [(radius + 1, radius) if each == axis else (0, 0) for each in range(3)]
            sums = np.cumsum(np.pad(values, sides, mode="edge"), axis=axis, dtype=np.float64)
            upper = sums[width:] if axis == 0 else sums[:, width:]
            lower = sums[:-width] if axis == 0 else sums[:, :-width]
            values = ((upper - lower) / width).astype(np.float32)
    return values


def around(mask: PixelMask, margin: int) -> Box:
    """The box of the masked pixels with a margin, as far as the mask's picture goes."""
    lines = (np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0)))
    rows, cols = (
        range(max(int(line[0]) - margin, 0), min(int(line[-1]) + 1 + margin, length))
        for line, length in zip(lines, mask.shape, strict=True)
    )
    return Box(rows, cols)

"""Makes what was painted look like the photograph around it: its tones where it meets the photograph, and the
photograph's grain where it was painted at a lower resolution. Changes masked pixels only; knows no model.

Both are measured on the ring, the unmasked pixels around the mask. Tones: the difference between the photograph and
what the model makes of the same pixels is blurred and goes on into the mask, where it fades. Grain: the photograph's
finest bands are measured where they are quietest, because there they are grain and not texture; noise of the same
strength and the same colours fills what the painted part lacks.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instgenie.pictures.fitting import crop
from instgenie.pictures.resizing import resize_mask, resize_part, resize_picture
from instgenie.types import Box, OwnPixels, PixelMask

RING = 16  # pixels of the model around the mask that are compared with the photograph
TONE_STEP = 2  # pixels of the model between the points at which tones are compared
TONE_RADIUS = 2  # points; three box filters of it are nearly a Gaussian of twice the width
FULL_TONE = 0.3  # share of unmasked pixels nearby from which on the tones are matched in full
NATIVE = 1.05  # pixels of the photograph per pixel of the model up to which the model paints the photograph's own grain
MAX_BANDS = 3  # of grain; each is half as fine as the one before
MAX_GRAINY = 2**20  # pixels of the photograph around the mask; in more, grain takes seconds
QUIET = 0.3  # share of the ring, its quietest part, that shows the grain

Values = NDArray[np.float32]  # [height, width, channels]


def match(photo: OwnPixels, edited: OwnPixels, mask: PixelMask, read: Box, seed: int) -> OwnPixels:
    """What was painted, at the photograph's size. `read` is the part of `edited` that was decoded."""
    size = mask.shape
    kept = ~mask & (photo[..., -1] == 255) if photo.shape[2] in (2, 4) else ~mask
    painted = resize_picture(edited, size).copy()
    if not kept.any():
        return painted
    colours = np.ascontiguousarray(photo[..., : edited.shape[2]])
    scale = math.sqrt(mask.size / (edited.shape[0] * edited.shape[1]))
    near = around(mask, round(RING * scale))
    inside = crop(painted, near).astype(np.float32)
    inside += tones(colours, edited, resize_mask(~kept, edited.shape[:2]), read, near)
    if scale > NATIVE and inside[..., 0].size <= MAX_GRAINY:
        ring = crop(kept, near)
        inside += grain(crop(colours, near).astype(np.float32), inside, crop(mask, near), ring, scale, seed)
    rows, cols = (slice(side.start, side.stop) for side in near)
    painted[rows, cols] = np.rint(np.clip(inside, 0, 255))
    return painted


def tones(photo: OwnPixels, edited: OwnPixels, mask: PixelMask, read: Box, near: Box) -> Values:
    """What to add to the part `near` of the photograph, so that tones go on from its own into the mask. `mask` has the
    size of `edited`."""
    ring = crop(~mask, read)[..., None].astype(np.float32)
    difference = (resize_part(photo, mask.shape, read).astype(np.float32) - crop(edited, read)) * ring
    smooth = blurred(thinned(np.concatenate([difference, ring], axis=2), TONE_STEP), TONE_RADIUS, 3)
    offset = smooth[..., :-1] / np.maximum(smooth[..., -1:], np.float32(FULL_TONE))
    scales = [length / own for length, own in zip(mask.shape, photo.shape, strict=False)]
    lines = [  # where `near` lies among the points of the offset
        (max((side.start * scale - part.start) / TONE_STEP, 0), min((side.stop * scale - part.start) / TONE_STEP, most))
        for side, part, scale, most in zip(near, read, scales, offset.shape, strict=False)
    ]
    return stretched(offset, lines, near.size)


def thinned(values: Values, step: int) -> Values:
    """The means over squares of `step` pixels; values beyond the border are those at it."""
    height, width, channels = values.shape
    padded = np.pad(values, [(0, -height % step), (0, -width % step), (0, 0)], mode="edge")
    means: Values = padded.reshape(-(-height // step), step, -(-width // step), step, channels).mean(axis=(1, 3))
    return means


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


def stretched(values: NDArray[np.floating], lines: list[tuple[float, float]], size: tuple[int, int]) -> Values:
    """The values between two rows and two columns, which need not be whole numbers, interpolated to `size`."""
    (top, bottom), (left, right) = lines
    channels = [Image.fromarray(np.ascontiguousarray(values[..., each])) for each in range(values.shape[2])]
    new, box = (size[1], size[0]), (left, top, right, bottom)
    return np.stack([np.asarray(one.resize(new, Image.Resampling.BILINEAR, box=box)) for one in channels], axis=2)


def around(mask: PixelMask, margin: int) -> Box:
    """The box of the masked pixels with a margin, as far as the mask's picture goes."""
    lines = (np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0)))
    rows, cols = (
        range(max(int(line[0]) - margin, 0), min(int(line[-1]) + 1 + margin, length))
        for line, length in zip(lines, mask.shape, strict=True)
    )
    return Box(rows, cols)

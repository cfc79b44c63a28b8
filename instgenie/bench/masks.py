"""Masks for a study: a pet's outline, a box or a stroke, scaled until it covers a given share of the tokens."""

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from instgenie.pictures.compositing import edge_distance
from instgenie.pictures.mask import token_mask
from instgenie.types import PixelMask

MaskKind = Literal["outline", "box", "stroke"]
Field = NDArray[np.float64]  # [height, width]; pixels below a level are masked, so a higher level masks more
NUM_TURNS = 4  # in a stroke
NUM_HALVINGS = 24


def mask_of_ratio(field: Field, ratio: float, patch: int) -> PixelMask:
    """Return the level set whose share of masked tokens is nearest to the ratio; it is never empty."""
    low, high = float(field.min()), float(field.max()) + 1e-6
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if token_share(field < middle, patch) < ratio:
            low = middle
        else:
            high = middle
    return min((field < high, field <= low), key=lambda mask: abs(token_share(mask, patch) - ratio))


def token_share(mask: PixelMask, patch: int) -> float:
    return float(token_mask(mask, patch).mean())


def outline_field(outline: PixelMask) -> Field:
    """Return the signed distance to the outline in pixels, negative inside, up to a quarter of the picture."""
    limit = max(outline.shape) // 4
    return edge_distance(~outline, limit, limit).astype(np.float64) - edge_distance(outline, limit, limit)


def box_field(size: tuple[int, int], generator: Generator) -> Field:
    """Return a field whose level sets are boxes of one centre and aspect ratio."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    aspect = np.exp(generator.uniform(-0.4, 0.4))
    centre_y, centre_x = generator.uniform(0.3, 0.7, 2) * size
    box: Field = np.maximum(np.abs(y - centre_y) * aspect, np.abs(x - centre_x) / aspect)
    return box


def stroke_field(size: tuple[int, int], ratio: float, generator: Generator) -> Field:
    """Return the distance to a line with a few turns; small ratios get a short line, so that no stroke is thin."""
    reach = 0.25 * min(2.2 * ratio**0.5, 1)
    pixels = np.moveaxis(np.mgrid[: size[0], : size[1]] + 0.5, 0, 2)  # [height, width, 2]
    start = generator.uniform(0.25, 0.75, 2)
    moves = generator.uniform(-reach, reach, (NUM_TURNS, 2)).cumsum(axis=0)
    points = np.vstack([start, np.clip(start + moves, 0.08, 0.92)]) * size
    distances = [segment_distance(pixels, a, b) for a, b in pairwise(points)]
    nearest: Field = np.min(distances, axis=0)
    return nearest


def segment_distance(pixels: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]) -> Field:
    along, offset = b - a, pixels - a
    share = np.clip(offset @ along / max(float(along @ along), 1e-9), 0, 1)
    distance: Field = np.linalg.norm(offset - share[..., None] * along, axis=2)
    return distance

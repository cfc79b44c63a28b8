"""Masks for a study: a pet's outline, a box or a stroke, each grown or shrunk until it covers a given share of the
tokens. Knows pixels and patches; no photograph's caption and no model."""

from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import edge_distance
from instgenie.types import PixelMask

MaskKind = Literal["outline", "box", "stroke"]
Field = NDArray[np.float64]  # [height, width]; a mask is where it is below a level, so a higher level masks more
NUM_TURNS = 4  # of a stroke
NUM_HALVINGS = 24


def mask_of_ratio(field: Field, ratio: float, patch: int) -> PixelMask:
    """The level set whose share of masked tokens comes nearest to the ratio; never empty."""
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
    """How far a pixel is outside the outline, in pixels, up to a quarter of the picture; inside it is below 0."""
    limit = max(outline.shape) // 4
    return edge_distance(~outline, limit).astype(np.float64) - edge_distance(outline, limit)


def box_field(size: tuple[int, int], generator: Generator) -> Field:
    """Boxes around one centre, of one aspect."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    aspect = np.exp(generator.uniform(-0.4, 0.4))
    centre_y, centre_x = generator.uniform(0.3, 0.7, 2) * size
    box: Field = np.maximum(np.abs(y - centre_y) * aspect, np.abs(x - centre_x) / aspect)
    return box


def stroke_field(size: tuple[int, int], ratio: float, generator: Generator) -> Field:
    """Distance to a line that turns a few times; a short one for a small ratio, so that no stroke is a hair."""
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

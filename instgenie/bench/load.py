"""A load of edits, drawn from a seed: when each arrives, which picture, how much of it is masked. Knows no server.

Mask ratios are quantiles of measured distributions: `production` of 970 face-swap templates (mean .11), `inpaint` of
1,918 inpainting requests (mean .35), `retouch` of 1,870 retouching ones (mean .03).
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instgenie.errors import ServeError

# 0 %, 5 %, ... 100 %
QUANTILES: dict[str, tuple[float, ...]] = {
    "production": (
        0.016, 0.038, 0.048, 0.055, 0.061, 0.067, 0.072, 0.076, 0.082, 0.088, 0.095,
        0.103, 0.11, 0.119, 0.128, 0.139, 0.154, 0.177, 0.208, 0.245, 0.421,
    ),
    "inpaint": (
        0.001, 0.018, 0.06, 0.129, 0.15, 0.164, 0.176, 0.186, 0.195, 0.207, 0.221,
        0.233, 0.251, 0.282, 0.343, 0.612, 0.757, 0.826, 0.873, 0.916, 1.0,
    ),
    "retouch": (
        0.002, 0.003, 0.009, 0.012, 0.013, 0.015, 0.017, 0.018, 0.019, 0.021, 0.023,
        0.025, 0.028, 0.031, 0.034, 0.038, 0.041, 0.046, 0.053, 0.065, 0.386,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds after the first
    picture: int
    mask_ratio: float
    seed: int


def read_ratios(source: str) -> tuple[float, ...]:
    """A name of ours, or a file: a JSON list, or one number per line."""
    if source in QUANTILES:
        return QUANTILES[source]
    try:
        text = Path(source).read_text()
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        ratios = tuple(sorted(float(value) for value in values))
    except (OSError, ValueError, TypeError):
        known = ", ".join(QUANTILES)
        raise ServeError(f"mask ratios {source!r}: {known}, or a file of numbers, is expected") from None
    if not ratios or not 0 <= ratios[0] <= ratios[-1] <= 1:
        raise ServeError(f"the mask ratios in {source} are not numbers from 0 to 1")
    return ratios


def draw_load(
    num_edits: int, request_rate: float, num_pictures: int, ratios: Sequence[float], seed: int
) -> list[Arrival]:
    """Poisson arrivals; an infinite rate is all at once. A ratio is drawn between the quantiles."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / request_rate, num_edits)
    places = np.linspace(0, 1, len(ratios))
    return [
        Arrival(float(at), int(picture), float(np.interp(place, places, ratios)), int(edit_seed))
        for at, picture, place, edit_seed in zip(
            np.cumsum(gaps) - gaps[0],
            rng.integers(0, num_pictures, num_edits),
            rng.random(num_edits),
            rng.integers(0, 2**31, num_edits),
            strict=True,
        )
    ]


def make_picture(seed: int, size: tuple[int, int]) -> bytes:
    """A PNG of smooth colours, another for each seed."""
    height, width = size
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return encode(np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)))


def make_mask(ratio: float, seed: int, size: tuple[int, int]) -> bytes:
    """A PNG with alpha 0 in a box of this share of the picture, somewhere in it."""
    height, width = size
    rng = np.random.default_rng(seed)
    rows, columns = (max(1, min(side, round(side * ratio**0.5))) for side in size)
    top, left = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
    pixels = np.full((height, width, 4), 255, np.uint8)
    pixels[top : top + rows, left : left + columns, 3] = 0
    return encode(pixels)


def encode(pixels: NDArray[np.uint8]) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()

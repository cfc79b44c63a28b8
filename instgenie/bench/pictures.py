"""Pictures and masks for workloads, drawn from seeds and encoded as PNGs."""

import io
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from instgenie.bench.masks import Field, box_field
from instgenie.types import PixelMask

MaskShape = Literal["blob", "box", "outline"]
NUM_WAVES = 5  # in a blob's rim


def make_picture(seed: int, size: tuple[int, int]) -> bytes:
    """Draw smooth colours, different for each seed, as a PNG."""
    height, width = size
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return encode(np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)))


def make_mask(ratio: float, shape: MaskShape, seed: int, size: tuple[int, int]) -> bytes:
    """Draw a mask as a PNG with alpha 0 on masked pixels."""
    pixels = np.full((*size, 4), 255, np.uint8)
    pixels[..., 3][draw_mask(ratio, shape, seed, size)] = 0
    return encode(pixels)


def draw_mask(ratio: float, shape: MaskShape, seed: int, size: tuple[int, int]) -> PixelMask:
    """Mask the share `ratio` of the pixels, at least one, somewhere in the picture."""
    field = draw_field(shape, size, np.random.default_rng(seed)).ravel()
    num_masked = min(max(round(ratio * field.size), 1), field.size)
    mask = np.zeros(field.size, np.bool_)
    mask[np.argpartition(field, num_masked - 1)[:num_masked]] = True
    return mask.reshape(size)


def draw_field(shape: MaskShape, size: tuple[int, int], generator: Generator) -> Field:
    if shape == "box":
        return box_field(size, generator)
    return blob_field(size, generator) if shape == "blob" else outline_field(size, generator)


def blob_field(size: tuple[int, int], generator: Generator) -> Field:
    """Return a field whose level sets are discs with a wavy rim, like the marks of a brush."""
    dy, dx = np.mgrid[: size[0], : size[1]] + 0.5 - (generator.uniform(0.3, 0.7, 2) * size)[:, None, None]
    angle = np.arctan2(dy, dx)
    rim = 1 + sum(
        generator.uniform(-0.3, 0.3) / wave * np.cos(wave * angle + generator.uniform(0, 2 * np.pi))
        for wave in range(1, NUM_WAVES + 1)
    )
    blob: Field = np.hypot(dy, dx) / rim
    return blob


def outline_field(size: tuple[int, int], generator: Generator) -> Field:
    """Return a field whose level sets look like a segmented figure: ellipses for head, body and two limbs."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    centre_y, centre_x = generator.uniform(0.4, 0.6, 2) * size
    scale = min(size)
    lean = generator.uniform(-0.1, 0.1)
    parts = [(-0.28, lean, 0.5, 0.45), (0.1, 0.0, 1.1, 0.6)]  # place and radii, in shares of the picture
    parts += [(0.15, side * generator.uniform(0.15, 0.3), 0.8, 0.22) for side in (-1, 1)]
    ellipses = [
        np.hypot((y - centre_y - scale * down) / tall, (x - centre_x - scale * right) / wide)
        for down, right, tall, wide in parts
    ]
    outline: Field = np.min(ellipses, axis=0)
    return outline


def encode(pixels: NDArray[np.uint8]) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()

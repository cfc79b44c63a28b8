"""Fits an edit to the size of an answer. A picture is scaled, and padded or cropped, but never squashed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from instgenie.errors import MaskError
from instgenie.pictures.photo import Photo
from instgenie.pictures.resizing import resize_mask, resize_picture
from instgenie.types import Box, Notes, OwnPixels, PixelMask

Fit = Literal["contain", "cover"]  # the whole picture with painted borders, or as much of it as fills the answer
Number = TypeVar("Number", np.uint8, np.bool_)


def fit_photo(photo: Photo, mask: PixelMask, size: tuple[int, int], fit: Fit, notes: Notes) -> tuple[Photo, PixelMask]:
    """Bring a picture and its mask to `size`, (height, width). Whatever is lost or painted is added to `notes`."""
    own = mask.shape
    box = middle_of(size, largest_within(size, own))
    if box.size == size:
        return scaled(photo, mask, size)
    if fit == "contain":
        notes.append(
            f"The picture of {name(own)} was scaled to {name(box.size)}, and the borders up to {name(size)} were "
            "painted; fit=cover crops the picture instead."
        )
        photo, mask = scaled(photo, mask, box.size)
        sides = [(part.start, length - part.stop) for part, length in zip(box, size, strict=True)]
        padded = changed(photo, lambda pixels: np.pad(pixels, [*sides, (0, 0)], mode="edge"))
        return padded, np.pad(mask, sides, constant_values=True)
    box = middle_of(own, largest_within(own, size))
    notes.append(
        f"The middle of the picture of {name(own)}, {name(box.size)}, was cut out and scaled to {name(size)}; "
        "fit=contain keeps all of it."
    )
    photo, mask = changed(photo, lambda pixels: crop(pixels, box)), crop(mask, box)
    if not mask.any():
        raise MaskError("the mask lies in the part of the picture that is cut off: use fit=contain")
    return scaled(photo, mask, size)


def name(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


def largest_within(size: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """The largest size of a shape that fits into `size`."""
    factor = min(size[0] / shape[0], size[1] / shape[1])
    height, width = (min(max(round(factor * side), 1), most) for side, most in zip(shape, size, strict=True))
    return height, width


def middle_of(size: tuple[int, int], part: tuple[int, int]) -> Box:
    top, left = ((whole - side) // 2 for whole, side in zip(size, part, strict=True))
    return Box(range(top, top + part[0]), range(left, left + part[1]))


def crop(pixels: NDArray[Number], box: Box) -> NDArray[Number]:
    return pixels[box.rows.start : box.rows.stop, box.cols.start : box.cols.stop]


def scaled(photo: Photo, mask: PixelMask, size: tuple[int, int]) -> tuple[Photo, PixelMask]:
    return changed(photo, lambda pixels: resize_picture(pixels, size)), resize_mask(mask, size)


def changed(photo: Photo, change: Callable[[OwnPixels], OwnPixels]) -> Photo:
    """Change the picture and, alike, the pixels of its file."""
    source = photo.source
    if source and source.pixels is not None:
        source = replace(source, pixels=change(source.pixels))
    return replace(photo, pixels=change(photo.pixels), source=source)

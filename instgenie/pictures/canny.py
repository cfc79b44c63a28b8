"""Edges of a picture, for ControlNets that follow them: Canny's method, as OpenCV computes it. Knows no model."""

import numpy as np
from numpy.typing import NDArray

from instgenie.types import Pixels

LOW, HIGH = 100, 200  # of the gradient's norm: edges begin above the high threshold and go on above the low one
TAN = np.tan(np.pi / 8)  # between a horizontal or vertical direction and a diagonal one


def canny(picture: Pixels, low: float = LOW, high: float = HIGH) -> Pixels:
    """White edges on black, one pixel wide [height, width, 3]."""
    across, down = gradients(picture)
    norm = np.abs(across) + np.abs(down)
    thin = np.where(is_ridge(norm, across, down), norm, 0)
    edges = grow(thin > high, thin > low)
    return np.repeat((edges * np.uint8(255))[..., None], 3, axis=2)


def gradients(picture: Pixels) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Sobel's gradients across and down [height, width], each pixel's from the colour in which it changes most."""
    padded = np.pad(picture.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    smooth_down = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    smooth_across = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across = smooth_down[:, 2:] - smooth_down[:, :-2]
    down = smooth_across[2:] - smooth_across[:-2]
    strongest = (np.abs(across) + np.abs(down)).argmax(axis=2)[..., None]
    return np.take_along_axis(across, strongest, 2)[..., 0], np.take_along_axis(down, strongest, 2)[..., 0]


def is_ridge(norm: NDArray[np.int32], across: NDArray[np.int32], down: NDArray[np.int32]) -> NDArray[np.bool_]:
    """True where the norm is the largest along the gradient's direction, of eight."""
    height, width = norm.shape
    padded = np.pad(norm, 1)

    def moved(rows: int, columns: int) -> NDArray[np.int32]:
        return padded[1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]

    wide, high = np.abs(across), np.abs(down)
    same_sign = (across < 0) == (down < 0)
    before = np.select(
        [high < TAN * wide, high * TAN > wide, same_sign], [moved(0, -1), moved(-1, 0), moved(-1, -1)], moved(-1, 1)
    )
    after = np.select(
        [high < TAN * wide, high * TAN > wide, same_sign], [moved(0, 1), moved(1, 0), moved(1, 1)], moved(1, -1)
    )
    ridge: NDArray[np.bool_] = (norm > before) & (norm >= after)
    return ridge


def grow(strong: NDArray[np.bool_], weak: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The strong pixels, and all weak ones that touch them through others."""
    found, front = strong.copy(), np.flatnonzero(strong)
    height, width = weak.shape
    offsets = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column]
    while len(front):
        rows, columns = np.divmod(front, width)
        near = []
        for row, column in offsets:
            inside = (rows + row >= 0) & (rows + row < height) & (columns + column >= 0) & (columns + column < width)
            near.append((rows + row)[inside] * width + (columns + column)[inside])
        reached = np.unique(np.concatenate(near))
        front = reached[weak.flat[reached] & ~found.flat[reached]]
        found.flat[front] = True
    return found

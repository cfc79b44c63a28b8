"""A picture and masks of a given ratio, made from numbers alone, for measurements."""

import numpy as np

from instgenie.types import PixelMask, Pixels

MIDDLE = (0.5, 0.5)


def sample_picture(size: tuple[int, int]) -> Pixels:
    """Return a picture of three colour gradients."""
    height, width = size
    across = np.broadcast_to(np.linspace(0, 255, width), size)
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], size)
    return np.stack([across, down, across[:, ::-1]], axis=2).astype(np.uint8)


def mask_around(centre: tuple[float, float], size: tuple[int, int], patch: int, ratio: float) -> PixelMask:
    """Mask the share `ratio` of the tokens, those nearest to `centre`, which is given in shares of height and width."""
    num_rows, num_columns = (side // patch for side in size)
    y, x = np.mgrid[:num_rows, :num_columns]
    distance = np.hypot((y + 0.5) / num_rows - centre[0], (x + 0.5) / num_columns - centre[1]).ravel()
    tokens = np.zeros(num_rows * num_columns, np.bool_)
    tokens[np.argsort(distance, kind="stable")[: max(round(ratio * tokens.size), 1)]] = True
    return tokens.reshape(num_rows, num_columns).repeat(patch, axis=0).repeat(patch, axis=1)

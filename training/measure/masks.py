"""The masks of the figures, drawn on the CPU from a seed. They stay as they are when the masks of training change, so
that figures of different models can be compared."""

import torch
from torch import Generator, Tensor

from training.masks import bounding_boxes, dilate
from training.measure.bench import SIZE

AREA = (0.25, 0.6)  # of a box or ellipse, as a share of the picture
MIDDLE = (0.42, 0.58)  # where its centre is
RADIUS = (0.03, 0.09)  # of a scribble's brush, as a share of the width
SEGMENTS = 6
GROWTH = 8  # pixels that an outline is grown by
FRAME = 20  # pixels that stay visible around a box that hides the content


def uniform(num: int, low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(num, 1, 1, generator=generator) * (high - low) + low


def grid() -> tuple[Tensor, Tensor]:
    """Rows and columns of pixel centres as shares of the picture, [SIZE, 1] and [1, SIZE]."""
    line = (torch.arange(SIZE) + 0.5) / SIZE
    return line[:, None], line[None, :]


def box_masks(num: int, generator: Generator) -> Tensor:
    y, x, height, width = _places(num, generator)
    return (y < height / 2) & (x < width / 2)


def ellipse_masks(num: int, generator: Generator) -> Tensor:
    y, x, height, width = _places(num, generator)
    return (y / height).square() + (x / width).square() < 1 / torch.pi  # of the same area as the box


def _places(num: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distances of rows and columns from a centre near the middle, and a height and a width."""
    area, aspect = uniform(num, *AREA, generator), uniform(num, -0.3, 0.3, generator).exp()
    y, x = grid()
    centre_y, centre_x = uniform(num, *MIDDLE, generator), uniform(num, *MIDDLE, generator)
    return (y - centre_y).abs(), (x - centre_x).abs(), (area * aspect).sqrt(), (area / aspect).sqrt()


def scribble_masks(num: int, generator: Generator) -> Tensor:
    """One connected brush stroke of up to six segments."""
    start = torch.rand(num, 1, 2, generator=generator) * 0.8 + 0.1
    moves = torch.rand(num, SEGMENTS, 2, generator=generator) * 0.6 - 0.3
    points = torch.cat([start, (start + moves.cumsum(1)).clamp(0.02, 0.98)], 1)  # [num, SEGMENTS + 1, 2]
    num_used = torch.randint(1, SEGMENTS + 1, (num,), generator=generator)
    radius = uniform(num, *RADIUS, generator)
    y, x = grid()
    mask = torch.zeros(num, SIZE, SIZE, dtype=torch.bool)
    for i in range(SEGMENTS):
        a, along = points[:, i, :, None, None], (points[:, i + 1] - points[:, i])[:, :, None, None]
        from_y, from_x = y - a[:, 0], x - a[:, 1]
        place = (from_y * along[:, 0] + from_x * along[:, 1]) / along.square().sum(1).clamp(min=1e-6)
        place = place.clamp(0, 1)
        near = (from_y - place * along[:, 0]).square() + (from_x - place * along[:, 1]).square() < radius.square()
        mask |= near & (num_used > i)[:, None, None]
    return mask


def content_masks(outlines: Tensor) -> Tensor:
    """Boxes that hide everything a caption describes: around a pet, or all but a frame of the picture."""
    most = torch.zeros_like(outlines)
    most[:, FRAME:-FRAME, FRAME:-FRAME] = True
    is_pet = outlines.flatten(1).any(1)
    return torch.where(is_pet[:, None, None], bounding_boxes(dilate(outlines, GROWTH)), most)

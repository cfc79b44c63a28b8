"""Random masks on the device, a batch at a time: boxes, strokes, scattered patches, outlines."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def boxes(num: int, height: int, width: int, generator: Generator) -> Tensor:
    """[num, height, width] bool, each a rectangle of 4 to 70 % of the picture."""
    area = uniform((num,), 0.04, 0.7, generator)
    aspect = uniform((num,), -0.6, 0.6, generator).exp()
    box_height, box_width = (area * aspect).sqrt().clamp(max=0.95), (area / aspect).sqrt().clamp(max=0.95)
    top = uniform((num,), 0, 1, generator) * (1 - box_height)
    left = uniform((num,), 0, 1, generator) * (1 - box_width)
    y, x = grid(height, width, generator.device)
    inside_y = (y >= top[:, None]) & (y < (top + box_height)[:, None])
    inside_x = (x >= left[:, None]) & (x < (left + box_width)[:, None])
    return inside_y[:, :, None] & inside_x[:, None, :]


def strokes(num: int, height: int, width: int, radius: tuple[float, float], generator: Generator) -> Tensor:
    """[num, height, width] bool: one connected brush stroke of up to six segments; radius as a share of the width."""
    segments = 6
    start = uniform((num, 1, 2), 0.1, 0.9, generator)
    moves = uniform((num, segments, 2), -0.3, 0.3, generator)
    points = torch.cat([start, (start + moves.cumsum(1)).clamp(0.02, 0.98)], 1)  # [num, segments + 1, 2]
    used = torch.arange(segments, device=start.device) < uniform((num, 1), 1, segments + 1, generator)
    y, x = grid(height // 2, width // 2, generator.device)
    place = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1)  # [h, w, 2]
    thick = uniform((num, 1, 1), *radius, generator)
    mask = torch.zeros(num, height // 2, width // 2, dtype=torch.bool, device=start.device)
    for i in range(segments):
        near = distance_to_segment(place, points[:, i], points[:, i + 1]) < thick
        mask |= near & used[:, i, None, None]
    return F.interpolate(mask[:, None].float(), size=(height, width), mode="bilinear")[:, 0] > 0.5


def distance_to_segment(place: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """place [h, w, 2], a and b [n, 2] -> [n, h, w]."""
    along = (b - a)[:, None, None]
    offset = place[None] - a[:, None, None]
    share = (offset * along).sum(-1) / along.square().sum(-1).clamp(min=1e-6)
    return (offset - share.clamp(0, 1)[..., None] * along).norm(dim=-1)


def scattered(num: int, height: int, width: int, size: int, generator: Generator) -> Tensor:
    """[num, height, width] bool: patches of `size` pixels, masked with a probability of each picture's own."""
    rate = uniform((num, 1, 1, 1), 0.05, 0.5, generator)
    coarse = uniform((num, 1, -(-height // size), -(-width // size)), 0, 1, generator) < rate
    return F.interpolate(coarse.float(), scale_factor=size)[:, 0, :height, :width] > 0.5


def dilate(mask: Tensor, pixels: int) -> Tensor:
    """Grow masks [n, h, w] by a square of the given radius."""
    if pixels == 0:
        return mask
    size, pad = 2 * pixels + 1, pixels
    small = torch.bfloat16 if mask.is_cuda else torch.float32
    grown = F.max_pool2d(mask[:, None].to(small), (size, 1), 1, (pad, 0))
    return F.max_pool2d(grown, (1, size), 1, (0, pad))[:, 0] > 0.5


def erode(mask: Tensor, pixels: int) -> Tensor:
    """Shrink masks [n, h, w] by a square of the given radius; the picture's edge takes nothing away."""
    return ~dilate(~mask, pixels)


def bounding_boxes(mask: Tensor) -> Tensor:
    """[n, h, w] bool -> the filled bounding box of each."""
    rows, columns = mask.any(2), mask.any(1)
    return _span(rows)[:, :, None] & _span(columns)[:, None, :]


def inner_ellipses(boxes: Tensor) -> Tensor:
    """[n, h, w] bool, filled boxes -> the ellipse inside each."""
    return _ellipses(boxes, 1.0)


def outer_ellipses(mask: Tensor) -> Tensor:
    """[n, h, w] bool -> an ellipse around each, which cuts corners of the bounding box only."""
    return _ellipses(bounding_boxes(mask), 1.25)


def _ellipses(boxes: Tensor, reach: float) -> Tensor:
    y, x = grid(*boxes.shape[1:], boxes.device)
    distance = torch.zeros(boxes.shape, device=boxes.device)
    for line, places, shape in ((boxes.any(2), y, (-1, len(y), 1)), (boxes.any(1), x, (-1, 1, len(x)))):
        low = torch.where(line, places, 1.0).min(1).values[:, None]
        high = torch.where(line, places, 0.0).max(1).values[:, None]
        radius = ((high - low) / 2).clamp(min=1e-3) * reach
        distance = distance + ((places - (low + high) / 2) / radius).square().view(shape)
    return (distance <= 1) & boxes.flatten(1).any(1)[:, None, None]


def _span(line: Tensor) -> Tensor:
    line = line.to(torch.int32)
    return (line.cummax(1).values > 0) & (line.flip(1).cummax(1).values.flip(1) > 0)


def grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixel centres as shares of the picture."""
    y = (torch.arange(height, device=device) + 0.5) / height
    x = (torch.arange(width, device=device) + 0.5) / width
    return y, x

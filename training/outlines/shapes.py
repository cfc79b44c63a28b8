"""Shapes of things that nobody outlined: blobs, rectangles and ellipses with waves in their edges, and thin things such
as spoons, poles and branches. Shapes are shares of the object in each pixel, [B, 1, SIDE, SIDE]."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.outlines.network import SIDE

PARTS = 7  # straight parts of a thin thing


def uniform(count: int, low: float, high: float) -> Tensor:
    return torch.rand(count) * (high - low) + low


def log_uniform(count: int, low: float, high: float) -> Tensor:
    return torch.exp(uniform(count, math.log(low), math.log(high)))


def windows(scale: Tensor, turn: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the affine maps from the output to the source: `scale` is the source's share that fills the output."""
    flip = torch.where(torch.rand(len(scale)) < 0.5, -1.0, 1.0)
    cos, sin = scale * turn.cos(), scale * turn.sin()
    return torch.stack([torch.stack([cos * flip, -sin, x], 1), torch.stack([sin * flip, cos, y], 1)], 1)


def waves(count: int, cells: int) -> Tensor:  # [B, 1, SIDE, SIDE]
    return F.interpolate(torch.randn(count, 1, cells, cells), size=SIDE, mode="bicubic", align_corners=True)


def ramps(count: int, planes: int) -> Tensor:  # [B, planes, SIDE, SIDE]
    return F.interpolate(torch.rand(count, planes, 2, 2), size=SIDE, mode="bilinear", align_corners=True)


def blobs(count: int) -> Tensor:
    """Shapes between an ellipse and a rectangle, with waves in their edges."""
    size = log_uniform(count, 0.07, 0.75)
    ratio = torch.exp(0.4 * torch.randn(count))[:, None, None]
    middle = uniform(count, -0.7, 0.7) / size, uniform(count, -0.7, 0.7) / size
    maps = windows(1 / size, 3.2 * torch.rand(count), *middle)
    grid = F.affine_grid(maps, [count, 1, SIDE, SIDE], align_corners=False).abs()
    power = log_uniform(count, 1.4, 8)[:, None, None]
    radius = ((grid[..., 0] * ratio) ** power + (grid[..., 1] / ratio) ** power).clamp(min=1e-6) ** (1 / power)
    radius = radius + uniform(count, 0, 0.35)[:, None, None] * waves(count, 6)[:, 0]
    return ((1 - radius) * size[:, None, None] * SIDE / 3 + 0.5).clamp(0, 1)[:, None]


def thin(count: int) -> Tensor:
    """Bent lines of two to twelve pixels, some with a wider end, like spoons."""
    half = log_uniform(count, 0.12, 0.9)[:, None]  # of the length, as a share of half a side
    turn = uniform(count, 0, math.pi)[:, None]
    along = torch.linspace(-1, 1, PARTS + 1)[None] * half  # [B, PARTS + 1]
    across = uniform(count, -0.35, 0.35)[:, None] * half * (1 - torch.linspace(-1, 1, PARTS + 1)[None] ** 2)
    x = along * turn.cos() - across * turn.sin() + uniform(count, -0.6, 0.6)[:, None]
    y = along * turn.sin() + across * turn.cos() + uniform(count, -0.6, 0.6)[:, None]
    width = (half * log_uniform(count, 0.03, 0.13)[:, None]).clamp(min=1.6 / SIDE)
    widths = width * (1 + uniform(count, -0.5, 0.5)[:, None] * torch.linspace(-1, 1, PARTS + 1)[None])
    bowl = torch.zeros(PARTS + 1)
    bowl[-3:] = torch.tensor([0.9, 1.2, 0.7])
    has_bowl = (torch.rand(count, 1) < 0.4).float()
    widths = widths + has_bowl * bowl * half * uniform(count, 0.08, 0.3)[:, None]
    steps = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    best = torch.full((count, SIDE, SIDE), -1.0)
    for part in range(PARTS):
        x0, y0, w0 = (values[:, part, None, None] for values in (x, y, widths))
        x1, y1, w1 = (values[:, part + 1, None, None] for values in (x, y, widths))
        u, v = steps[None, None, :] - x0, steps[None, :, None] - y0
        share = ((u * (x1 - x0) + v * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)).clamp(0, 1)
        apart = ((u - share * (x1 - x0)) ** 2 + (v - share * (y1 - y0)) ** 2).sqrt()
        best = torch.maximum(best, w0 + share * (w1 - w0) - apart)
    return (best * SIDE / 2 + 0.5).clamp(0, 1)[:, None]

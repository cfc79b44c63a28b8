"""Edges of a batch of pictures on the device: what `instgenie.pictures.canny` finds, pixel by pixel. Knows no model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.pictures.canny import HIGH, LOW, TAN

DILATIONS = 16  # between two looks at whether edges still grow


def edge_images(pictures: Tensor, enlarged: int = 1) -> Tensor:
    """White edges on black [B, 3, height, width] in [-1, 1], of pictures in [-1, 1].

    Edges of a picture that is larger than the model's size are found there and shrink with it; `enlarged` says how many
    times larger it is.
    """
    size = pictures.shape[-2:]
    if enlarged > 1:
        pictures = F.interpolate(pictures, scale_factor=enlarged, mode="bicubic", align_corners=False)
    pixels = ((pictures.clamp(-1, 1) + 1) * 127.5).round().to(torch.int32)
    edges = canny_batch(pixels)[:, None].float()
    if enlarged > 1:
        edges = F.interpolate(edges, size=size, mode="area")
    return (2 * edges - 1).expand(-1, 3, -1, -1)


def canny_batch(pixels: Tensor) -> Tensor:
    """[B, 3, height, width] int32 from 0 to 255 -> [B, height, width] bool."""
    across, down = gradients(pixels)
    norm = across.abs() + down.abs()
    thin = torch.where(is_ridge(norm, across, down), norm, 0)
    return grow(thin > HIGH, thin > LOW)


def gradients(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Sobel's gradients [B, height, width], each pixel's from the colour in which it changes most."""
    padded = F.pad(pixels.float(), (1, 1, 1, 1), mode="replicate").int()
    smooth_down = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    smooth_across = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    across = smooth_down[..., 2:] - smooth_down[..., :-2]
    down = smooth_across[..., 2:, :] - smooth_across[..., :-2, :]
    strength = across.abs() + down.abs()
    first = strength.shape[1] - torch.arange(strength.shape[1], device=pixels.device)[:, None, None]
    strongest = (strength * 4 + first).argmax(1, keepdim=True)  # of equal colours the first
    return across.gather(1, strongest)[:, 0], down.gather(1, strongest)[:, 0]


def is_ridge(norm: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """True where the norm is the largest along the gradient's direction, of eight."""
    height, width = norm.shape[1:]
    padded = F.pad(norm, (1, 1, 1, 1))

    def moved(rows: int, columns: int) -> Tensor:
        return padded[:, 1 + rows : 1 + rows + height, 1 + columns : 1 + columns + width]

    wide, high = across.abs().double(), down.abs().double()
    same_sign = (across < 0) == (down < 0)
    is_level, is_upright = high < TAN * wide, high * TAN > wide

    def neighbour(way: int) -> Tensor:
        diagonal = torch.where(same_sign, moved(way, way), moved(way, -way))
        return torch.where(is_level, moved(0, way), torch.where(is_upright, moved(way, 0), diagonal))

    return (norm > neighbour(-1)) & (norm >= neighbour(1))


def grow(strong: Tensor, weak: Tensor) -> Tensor:
    """The strong pixels, and all weak ones that touch them through others."""
    found, allowed = strong.float(), weak.float()
    while True:
        before = found
        for _ in range(DILATIONS):
            found = torch.maximum(found, F.max_pool2d(found, 3, 1, 1) * allowed)
        if torch.equal(before, found):
            return found > 0

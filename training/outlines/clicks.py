"""Clicks, boxes and loops as people make them: first inside the object, then in the middle of what is wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.outlines.network import SIDE

DEPTH = 12  # erosions after which a place counts as deep inside
SKIPPED = 0.15  # share of further clicks that are left out: the page also looks again without a new click


def depth(mask: Tensor) -> Tensor:
    """Return for each place roughly how far it lies inside the mask."""
    total, left = mask.clone(), mask
    for _ in range(DEPTH):
        left = -F.max_pool2d(-F.pad(left, (1, 1, 1, 1)), 3, 1)
        total += left
    return total


def click_in(weights: Tensor) -> Tensor:
    """Draw one place (x, y) per example, with probabilities in proportion to `weights` [B, 1, H, W]."""
    at = torch.multinomial(weights.flatten(1) + 1e-9, 1)[:, 0]
    return torch.stack([at % SIDE, at // SIDE], 1).float()


def first_clicks(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return one click per example [B, 1, 3] and the hint. One in five has a box or a loop; half of those no click."""
    count = len(targets)
    inside = depth(targets)
    sharp = torch.where(torch.rand(count, 1, 1, 1) < 0.5, 12.0, 1.5)
    place = click_in((inside / inside.amax((2, 3), keepdim=True)) ** sharp)
    hinted = torch.rand(count) < 0.2
    sign = torch.where(hinted & (torch.rand(count) < 0.5), 0.0, 1.0)
    hint = torch.where(torch.rand(count, 1, 1, 1) < 0.6, boxes(targets), loops(targets))
    return torch.cat([place, sign[:, None]], 1)[:, None], hint * hinted[:, None, None, None]


def boxes(targets: Tensor) -> Tensor:
    inside = torch.ones_like(targets)
    for across in (2, 3):
        line = targets.amax(across)[:, 0]  # [B, SIDE]
        first, last = line.argmax(1).float(), SIDE - 1 - line.flip(1).argmax(1).float()
        slack = (last - first) * 0.06
        first, last = (edge + slack * torch.randn(len(line)) for edge in (first - slack, last + slack))
        steps = torch.arange(SIDE)
        covered = ((steps >= first[:, None]) & (steps <= last[:, None])).float()
        inside = inside * (covered[:, None, None, :] if across == 2 else covered[:, None, :, None])
    return inside


def loops(targets: Tensor) -> Tensor:
    wide = F.avg_pool2d(F.pad(targets, (10, 10, 10, 10)), 21, 1)
    waves = F.interpolate(torch.randn(len(targets), 1, 7, 7), size=SIDE, mode="bicubic", align_corners=True)
    return (wide + 0.08 * waves > 0.12).float()


def next_clicks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a click [B, 1, 3] in the middle of what is wrong: inside if it was missed, outside if it was taken."""
    wrong = ((logits > 0).float() - targets).abs()
    within = depth(wrong)
    place = click_in((within / within.amax((2, 3), keepdim=True).clamp(min=1)) ** 8)
    at = (place[:, 1] * SIDE + place[:, 0]).long()
    is_wrong = wrong.flatten(1).gather(1, at[:, None])[:, 0]
    is_wrong = is_wrong * (torch.rand(len(wrong), device=wrong.device) >= SKIPPED)
    inside = targets.flatten(1).gather(1, at[:, None])[:, 0]
    return torch.cat([place, ((2 * inside - 1) * is_wrong)[:, None]], 1)[:, None]

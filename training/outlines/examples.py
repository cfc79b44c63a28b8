"""Pictures to learn outlines from: pets, pets pasted into other pictures, and patches of any texture and shape.

Only pets have outlines. Patches of one picture pasted into another teach that an object is what its edges enclose,
whatever it is."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.outlines.network import SIDE

PLAIN = 0.45  # share of photographs of pets as they are
SOLID = 0.3  # share of patches that have one colour
DEPTH = 10  # erosions after which a place counts as deep inside


@dataclass
class Sources:
    pets: Tensor  # [N, 3, 128, 128] uint8
    outlines: Tensor  # [N, 128, 128] bool
    others: Tensor  # [M, 3, 128, 128] uint8: backgrounds and textures


def chosen(images: Tensor, count: int) -> Tensor:
    return torch.randint(len(images), (count,))


def uniform(count: int, low: float, high: float) -> Tensor:
    return torch.rand(count) * (high - low) + low


def windows(scale: Tensor, turn: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the affine maps from the output to the source: `scale` is the source's share that fills the output."""
    flip = torch.where(torch.rand(len(scale)) < 0.5, -1.0, 1.0)
    cos, sin = scale * turn.cos(), scale * turn.sin()
    return torch.stack([torch.stack([cos * flip, -sin, x], 1), torch.stack([sin * flip, cos, y], 1)], 1)


def sampled(images: Tensor, maps: Tensor, padding: str) -> Tensor:
    grid = F.affine_grid(maps, [len(images), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(images, grid, "bilinear", padding, align_corners=False)


def recoloured(images: Tensor) -> Tensor:
    count = len(images)
    gain = 1 + 0.25 * torch.randn(count, 1, 1, 1)
    tint = 1 + 0.12 * torch.randn(count, 3, 1, 1)
    lift = 0.08 * torch.randn(count, 1, 1, 1)
    return (((images - 0.5) * gain * tint) + 0.5 + lift).clamp(0, 1)


def plain(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    at = chosen(sources.pets, count)
    scale = uniform(count, 0.45, 1.05)
    reach = (1 - scale).clamp(min=0)
    maps = windows(scale, 0.15 * torch.randn(count), uniform(count, -1, 1) * reach, uniform(count, -1, 1) * reach)
    both = torch.cat([sources.pets[at].float() / 255, sources.outlines[at, None].float()], 1)
    both = sampled(both, maps, "reflection")
    return both[:, :3], both[:, 3:]


def background(sources: Sources, count: int) -> Tensor:
    scale = uniform(count, 0.2, 1.0)
    maps = windows(
        scale, 0.3 * torch.randn(count), uniform(count, -1, 1) * (1 - scale), uniform(count, -1, 1) * (1 - scale)
    )
    return recoloured(sampled(sources.others[chosen(sources.others, count)].float() / 255, maps, "reflection"))


def cut_out(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    at = chosen(sources.pets, count)
    outline = sources.outlines[at, None].float()
    outline = -F.max_pool2d(-outline, 3, 1, 1)  # the outlines hold a rim of background
    scale = torch.exp(uniform(count, math.log(0.8), math.log(4.5)))
    maps = windows(
        scale, 0.3 * torch.randn(count), uniform(count, -1, 1) * scale * 0.7, uniform(count, -1, 1) * scale * 0.7
    )
    both = sampled(torch.cat([sources.pets[at].float() / 255, outline], 1), maps, "zeros")
    return recoloured(both[:, :3]), both[:, 3:]


def patch(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    """Cut shapes between an ellipse and a rectangle, with waves in their edges, out of any picture."""
    texture = background(sources, count)
    ramp = F.interpolate(torch.rand(count, 3, 2, 2), size=SIDE, mode="bilinear", align_corners=True)
    flat = torch.rand(count, 3, 1, 1) + 0.35 * (ramp - 0.5)
    texture = torch.where(torch.rand(count, 1, 1, 1) < SOLID, flat + 0.02 * torch.randn_like(texture), texture).clamp(
        0, 1
    )
    size = torch.exp(uniform(count, math.log(0.12), math.log(0.75)))
    ratio = torch.exp(0.4 * torch.randn(count))
    maps = windows(
        1 / size, 3.2 * torch.rand(count), uniform(count, -0.7, 0.7) / size, uniform(count, -0.7, 0.7) / size
    )
    grid = F.affine_grid(maps, [count, 1, SIDE, SIDE], align_corners=False).abs()
    power = torch.exp(uniform(count, math.log(1.4), math.log(8)))[:, None, None]
    radius = (grid[..., 0] * ratio[:, None, None]) ** power + (grid[..., 1] / ratio[:, None, None]) ** power
    waves = F.interpolate(torch.randn(count, 1, 6, 6), size=SIDE, mode="bicubic", align_corners=True)[:, 0]
    radius = radius.clamp(min=1e-6) ** (1 / power) + uniform(count, 0, 0.35)[:, None, None] * waves
    return texture, ((1 - radius) / size.reciprocal()[:, None, None] * SIDE / 3 + 0.5).clamp(0, 1)[:, None]


def composed(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    picture = background(sources, count)
    targets = torch.zeros(count, 3, SIDE, SIDE)
    for layer in range(3):
        (one, one_alpha), (other, other_alpha) = cut_out(sources, count), patch(sources, count)
        is_pet = torch.rand(count, 1, 1, 1) < 0.4
        colours, alpha = torch.where(is_pet, one, other), torch.where(is_pet, one_alpha, other_alpha)
        alpha = alpha * (torch.rand(count, 1, 1, 1) < (1.0, 0.6, 0.4)[layer])
        picture = picture * (1 - alpha) + colours * alpha
        targets *= 1 - alpha
        targets[:, layer : layer + 1] = alpha
    seen = targets.sum((2, 3)) + 1e-3 * torch.rand(count, 3)
    weights = torch.where(seen > 35, seen.sqrt(), 1e-6 * seen)
    target = targets[torch.arange(count), torch.multinomial(weights, 1)[:, 0]][:, None]
    return picture, target


def batch_of(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    """Return pictures [B, 3, SIDE, SIDE] and targets [B, 1, SIDE, SIDE] of 0 and 1."""
    num_plain = int(count * PLAIN)
    parts = [plain(sources, num_plain), composed(sources, count - num_plain)]
    pictures, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    pictures = recoloured(pictures)
    grey = pictures.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    pictures = torch.where(torch.rand(count, 1, 1, 1) < 0.06, grey, pictures)
    pictures = (pictures + 0.02 * torch.rand(count, 1, 1, 1) * torch.randn_like(pictures)).clamp(0, 1)
    targets = (targets > 0.5).float()
    enough = targets.sum((1, 2, 3)) > 25
    return pictures[enough], targets[enough]


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
    wide = F.avg_pool2d(F.pad(targets, (8, 8, 8, 8)), 17, 1)
    waves = F.interpolate(torch.randn(len(targets), 1, 7, 7), size=SIDE, mode="bicubic", align_corners=True)
    return (wide + 0.08 * waves > 0.12).float()


def next_clicks(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a click [B, 1, 3] in the middle of what is wrong: inside if it was missed, outside if it was taken."""
    wrong = ((logits > 0).float() - targets).abs()
    within = depth(wrong)
    place = click_in((within / within.amax((2, 3), keepdim=True).clamp(min=1)) ** 8)
    at = (place[:, 1] * SIDE + place[:, 0]).long()
    is_wrong = wrong.flatten(1).gather(1, at[:, None])[:, 0]
    inside = targets.flatten(1).gather(1, at[:, None])[:, 0]
    return torch.cat([place, ((2 * inside - 1) * is_wrong)[:, None]], 1)[:, None]

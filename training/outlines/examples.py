"""Pictures to learn outlines from: photographs of pets and garments as they are, and pictures with things pasted into
them: pets, garments and flowers cut out, and patches of any texture and shape.

Patches teach that an object is what its edges enclose, whatever it is."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.outlines.network import SIDE
from training.outlines.shapes import blobs, log_uniform, ramps, thin, uniform, waves, windows

PLAIN = 0.45  # share of photographs as they are
SOLID = 0.35  # share of patches that have one colour
SHOWN = (1.0, 0.7, 0.45)  # how often each layer of a composed picture has a thing
CUT_OUT, THIN = 0.35, 0.3  # shares of those things; the others are blobs
SMALLEST = 30  # pixels of a target at least
LARGEST = 0.85  # share of the picture that a target covers at most


@dataclass
class Sources:
    pictures: Tensor  # [N, 3, 256, 256] uint8: photographs with good outlines
    outlines: Tensor  # [N, 256, 256] bool
    objects: Tensor  # [O, 3, 128, 128] uint8: photographs to cut things out of
    shapes: Tensor  # [O, 128, 128] bool: their outlines
    others: Tensor  # [M, 3, 128, 128] uint8: backgrounds and textures


def chosen(images: Tensor, count: int) -> Tensor:
    return torch.randint(len(images), (count,))


def sampled(images: Tensor, maps: Tensor, padding: str, side: int = SIDE) -> Tensor:
    grid = F.affine_grid(maps, [len(images), 1, side, side], align_corners=False)
    return F.grid_sample(images, grid, "bilinear", padding, align_corners=False)


def recoloured(images: Tensor) -> Tensor:
    count = len(images)
    gain = 1 + 0.25 * torch.randn(count, 1, 1, 1)
    tint = 1 + 0.12 * torch.randn(count, 3, 1, 1)
    lift = 0.08 * torch.randn(count, 1, 1, 1)
    return (((images - 0.5) * gain * tint) + 0.5 + lift).clamp(0, 1)


def shaded(images: Tensor) -> Tensor:
    """Light that comes from one side."""
    return images * (1 + uniform(len(images), 0, 0.8)[:, None, None, None] * (ramps(len(images), 1) - 0.5))


def plain(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    at = chosen(sources.pictures, count)
    scale = uniform(count, 0.45, 1.15)
    reach = (1 - scale).clamp(min=0.05)
    maps = windows(scale, 0.15 * torch.randn(count), uniform(count, -1, 1) * reach, uniform(count, -1, 1) * reach)
    both = torch.cat([sources.pictures[at].float() / 255, sources.outlines[at, None].float()], 1)
    both = F.avg_pool2d(sampled(both, maps, "reflection", 2 * SIDE), 2)
    return both[:, :3], both[:, 3:]


def background(sources: Sources, count: int) -> Tensor:
    scale = log_uniform(count, 0.15, 1.0)
    reach = 1 - scale
    maps = windows(scale, 0.3 * torch.randn(count), uniform(count, -1, 1) * reach, uniform(count, -1, 1) * reach)
    return recoloured(sampled(sources.others[chosen(sources.others, count)].float() / 255, maps, "reflection"))


def cut_out(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    at = chosen(sources.objects, count)
    outline = sources.shapes[at, None].float()
    outline = -F.max_pool2d(-outline, 3, 1, 1)  # the outlines hold a rim of background
    scale = log_uniform(count, 0.8, 5)
    turn = torch.where(torch.rand(count) < 0.3, 3.0, 0.3) * torch.randn(count)
    maps = windows(scale, turn, uniform(count, -0.7, 0.7) * scale, uniform(count, -0.7, 0.7) * scale)
    both = sampled(torch.cat([sources.objects[at].float() / 255, outline], 1), maps, "zeros")
    return recoloured(both[:, :3]), both[:, 3:]


def patch(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    """Cut shapes out of any picture, or out of one colour."""
    texture = background(sources, count)
    flat = (
        torch.rand(count, 3, 1, 1)
        + 0.35 * (ramps(count, 3) - 0.5)
        + uniform(count, 0, 0.08)[:, None, None, None] * waves(count, 9)
    )
    texture = torch.where(torch.rand(count, 1, 1, 1) < SOLID, flat + 0.02 * torch.randn_like(texture), texture)
    num_thin = min(max(round(count * THIN / (1 - CUT_OUT)), 1), count - 1)
    alpha = torch.cat([thin(num_thin), blobs(count - num_thin)])[torch.randperm(count)]
    return texture.clamp(0, 1), alpha


def composed(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    picture = background(sources, count)
    targets = torch.zeros(count, len(SHOWN), SIDE, SIDE)
    for layer, shown in enumerate(SHOWN):
        (one, one_alpha), (other, other_alpha) = cut_out(sources, count), patch(sources, count)
        is_cut = torch.rand(count, 1, 1, 1) < CUT_OUT
        colours, alpha = torch.where(is_cut, one, other), torch.where(is_cut, one_alpha, other_alpha)
        alpha = alpha * (torch.rand(count, 1, 1, 1) < shown)
        picture = with_shadow(picture, alpha)
        picture = picture * (1 - alpha) + shaded(colours) * alpha
        targets *= 1 - alpha
        targets[:, layer : layer + 1] = alpha
    seen = targets.sum((2, 3)) + 1e-3 * torch.rand(count, len(SHOWN))
    weights = torch.where(seen > SMALLEST, seen.sqrt(), 1e-6 * seen)
    target = targets[torch.arange(count), torch.multinomial(weights, 1)[:, 0]][:, None]
    return picture, target


def with_shadow(pictures: Tensor, alpha: Tensor) -> Tensor:
    """Half of the things throw a soft shadow beside them."""
    reach = int(torch.randint(1, 6, (), device="cpu"))  # known without waiting for the device
    right, down = torch.randint(-2 * reach, 2 * reach + 1, (2,), device="cpu").tolist()
    shadow = F.avg_pool2d(torch.roll(alpha, (down, right), (2, 3)), 2 * reach + 1, 1, reach)
    depth = uniform(len(alpha), -0.5, 0.5).clamp(min=0)[:, None, None, None]
    return pictures * (1 - depth * shadow)


def batch_of(sources: Sources, count: int) -> tuple[Tensor, Tensor]:
    """Return pictures [B, 3, SIDE, SIDE] and targets [B, 1, SIDE, SIDE] of 0 and 1."""
    num_plain = int(count * PLAIN)
    parts = [plain(sources, num_plain), composed(sources, count - num_plain)]
    pictures, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    pictures = shaded(recoloured(pictures))
    is_soft = torch.rand(len(pictures), 1, 1, 1) < 0.25
    pictures = torch.where(is_soft, F.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False), pictures)
    grey = pictures.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    pictures = torch.where(torch.rand(count, 1, 1, 1) < 0.06, grey, pictures)
    pictures = (pictures + 0.03 * torch.rand(count, 1, 1, 1) * torch.randn_like(pictures)).clamp(0, 1)
    targets = (targets > 0.5).float()
    size = targets.sum((1, 2, 3))
    is_good = (size > SMALLEST) & (size < LARGEST * SIDE**2)
    return pictures[is_good], targets[is_good]

"""Names of colours from pixels: of a pet, a flower or a background, where one name clearly wins."""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.bench.photos import Photos

COLOURS = ("black", "white", "grey", "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
BLACK, WHITE, GREY, RED, ORANGE, YELLOW, GREEN, BLUE, PURPLE, PINK, BROWN = range(len(COLOURS))
HUES = ((12, RED), (42, ORANGE), (68, YELLOW), (165, GREEN), (255, BLUE), (300, PURPLE), (342, PINK), (361, RED))
SIDE = 64  # pictures are judged at this size
PETALS = (WHITE, RED, ORANGE, YELLOW, PURPLE, PINK)


def colour_names(pictures: Tensor) -> Tensor:
    """[N, 3, H, W] in [0, 1] -> [N, H, W], each pixel's row of COLOURS."""
    high, low = pictures.max(1).values, pictures.min(1).values
    spread = high - low
    red, green, blue = pictures.unbind(1)
    safe = spread.clamp(min=1e-6)
    hue = torch.where(
        high == red,
        ((green - blue) / safe) % 6,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    named = torch.full(hue.shape, RED, device=pictures.device)
    for limit, name in reversed(HUES):
        named = torch.where(60 * hue < limit, name, named)
    saturation = spread / high.clamp(min=1e-6)
    named = torch.where((named == ORANGE) & (high < 0.62), BROWN, named)
    named = torch.where((named == RED) & (saturation < 0.45) & (high > 0.6), PINK, named)
    grey = torch.where(high > 0.78, WHITE, GREY)
    named = torch.where(saturation < 0.16, grey, named)
    return torch.where(high < 0.2, BLACK, named)


def commonest(names: Tensor, where: Tensor, share: float, allowed: tuple[int, ...] = tuple(range(11))) -> list[str]:
    """The name that covers at least this share of the chosen pixels, of each picture; empty where none does."""
    counts = F.one_hot(names, len(COLOURS)).mul(where[..., None]).sum((1, 2)).float()
    chosen = torch.zeros_like(counts)
    chosen[:, list(allowed)] = counts[:, list(allowed)]
    best = chosen.max(1)
    enough = (best.values >= share * chosen.sum(1)) & (chosen.sum(1) >= 0.08 * names[0].numel())
    return [COLOURS[name] if ok else "" for name, ok in zip(best.indices.tolist(), enough.tolist(), strict=True)]


def photo_colours(photos: Photos) -> tuple[list[str], list[str]]:
    """The colour of the subject and of the background of each photograph; a colour given with it is kept."""
    subjects, backgrounds = list[str](), list[str]()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    middle = torch.zeros(SIDE, SIDE, dtype=torch.bool, device=device)
    middle[SIDE // 5 : -SIDE // 5, SIDE // 5 : -SIDE // 5] = True
    frame = torch.ones(SIDE, SIDE, dtype=torch.bool, device=device)
    frame[SIDE // 10 : -SIDE // 10, SIDE // 10 : -SIDE // 10] = False
    for start in range(0, len(photos), 512):
        rows = slice(start, start + 512)
        pictures = F.interpolate(photos.pictures[rows].to(device).float() / 255, size=(SIDE, SIDE), mode="area")
        outlines = F.interpolate(photos.outlines[rows, None].to(device).float(), size=(SIDE, SIDE), mode="area")[:, 0]
        names = colour_names(pictures)
        has_outline = outlines.flatten(1).any(1)[:, None, None]
        fur = commonest(names, outlines > 0.99, 0.5)
        petals = commonest(names, middle.expand_as(names), 0.6, PETALS)
        behind = commonest(names, torch.where(has_outline, outlines < 0.01, frame), 0.5)
        for species, given, pet, flower in zip(photos.species[rows], photos.colours[rows], fur, petals, strict=True):
            subjects.append(given if species == "clothing" else flower if species == "flower" else pet)
        backgrounds += behind
    return subjects, backgrounds

"""Scenes with a pet or a garment pasted in, and masks around it. The scene without the thing is the truth that a
removal is compared with."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from instgenie.bench.photos import Photos, PhotoSplit
from training.masks import bounding_boxes, dilate, erode
from training.measure.bench import SIZE
from training.measure.masks import grid
from training.measure.photographs import subset, where
from training.scenes import load_scenes

KINDS = ("tight", "grown", "loose")
ANIMALS = ("cat", "dog")
GARMENT = "clothing"
LENGTH = (0.3, 0.55)  # of a pasted thing's longer side, as a share of the picture
MARGIN = 6  # pixels between a pasted thing and the picture's edge
TIGHT, GROWN, LOOSE = 2, 12, 10  # pixels of a mask around the thing
AREA = (0.08, 0.6)  # of a thing in its own photograph
EDGE = 6  # pixels
TOUCHING = {GARMENT: 400}  # pixels of a thing that may lie within that edge; 36 of an animal
DIFFERENCE = 40  # of 255: a garment's pixels, from the colour of the picture's edges


@dataclass
class CutOuts:
    things: list[Image.Image]  # RGBA, cut to their box
    species: list[str]


@dataclass
class Removals:
    scenes: Tensor  # [N, 3, 256, 256] uint8: the truth
    pasted: Tensor  # the same with a thing in each
    masks: dict[str, Tensor]  # kind -> [N, 256, 256] bool
    species: list[str]  # of the things

    def __len__(self) -> int:
        return len(self.species)


def load_removals(
    photos: Photos, folder: str | Path, split: PhotoSplit, limit: int | None, num_photos: int | None = None
) -> Removals:
    """Paste things of the first `num_photos` pets and garments into the first `limit` scenes."""
    keep = where(photos, *ANIMALS, GARMENT)
    return paste(
        load_scenes(folder, split, limit).to(photos.pictures.device), cut_out(subset(photos, keep[:num_photos]))
    )


def cut_out(photos: Photos) -> CutOuts:
    """Cut pets along their outlines, and garments along what differs from the edges of their photograph. Things that
    the photograph's edge cuts off are left out."""
    is_pet = photos.outlines.flatten(1).any(1)[:, None, None]
    shapes = torch.where(is_pet, erode(photos.outlines, 1), garments(photos.pictures))
    areas = shapes.float().mean((1, 2)).tolist()
    inner = torch.nn.functional.pad(shapes[:, EDGE:-EDGE, EDGE:-EDGE], [EDGE] * 4)
    touching = (shapes & ~inner).sum((1, 2)).tolist()
    layers = torch.cat([photos.pictures, (shapes * 255).byte()[:, None]], 1).permute(0, 2, 3, 1).cpu().numpy()
    cut_outs = CutOuts([], [])
    for layer, name, area, num_touching in zip(layers, photos.species, areas, touching, strict=True):
        if AREA[0] < area < AREA[1] and num_touching < TOUCHING.get(name, EDGE * EDGE):
            image = Image.fromarray(layer)
            cut_outs.things.append(image.crop(image.getchannel("A").getbbox()))
            cut_outs.species.append(name)
    return cut_outs


def garments(pictures: Tensor) -> Tensor:
    """[N, H, W] bool: pixels that differ from the picture's edges, without specks and holes. Empty where the edges are
    of many colours."""
    around = torch.cat([pictures[..., :EDGE], pictures[..., -EDGE:]], -1).flatten(2).float()
    colour = around.median(2).values[:, :, None, None]
    differs = (pictures.float() - colour).abs().amax(1) > DIFFERENCE
    is_flat = (around - colour[..., 0]).abs().mean((1, 2)) < DIFFERENCE / 2
    closed = erode(dilate(differs, 3), 3)
    return dilate(erode(closed, 5), 4) & is_flat[:, None, None]


def paste(scenes: Tensor, cut_outs: CutOuts) -> Removals:
    """Animals and garments in turn, if there are both."""
    rows = range(len(cut_outs.species))
    groups = [[i for i in rows if (cut_outs.species[i] == GARMENT) == wanted] for wanted in (False, True)]
    groups = [group for group in groups if group]
    pasted, shapes, species = [], [], []
    for number, scene in enumerate(scenes.cpu()):
        draw = random.Random(number)
        row = draw.choice(groups[number % len(groups)])
        picture, shape = paste_one(scene, cut_outs.things[row], draw)
        pasted.append(picture)
        shapes.append(shape)
        species.append(cut_outs.species[row])
    device = scenes.device
    return Removals(scenes, torch.stack(pasted).to(device), mask_kinds(torch.stack(shapes).to(device)), species)


def paste_one(scene: Tensor, thing: Image.Image, draw: random.Random) -> tuple[Tensor, Tensor]:
    """The scene with the thing somewhere in it, and the thing's pixels."""
    scale = draw.uniform(*LENGTH) * SIZE / max(thing.size)
    width, height = (max(8, round(side * scale)) for side in thing.size)
    left, top = (draw.randint(MARGIN, SIZE - MARGIN - side) for side in (width, height))
    layer = Image.new("RGBA", (SIZE, SIZE))
    layer.paste(thing.resize((width, height), Image.Resampling.LANCZOS), (left, top))
    image = Image.fromarray(scene.permute(1, 2, 0).numpy()).convert("RGBA")
    pixels = np.array(Image.alpha_composite(image, layer).convert("RGB"))
    shape = np.array(layer.getchannel("A")) > 0
    return torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(shape)


def mask_kinds(shapes: Tensor) -> dict[str, Tensor]:
    """Masks along the thing, around it, and boxes and ellipses that hold it."""
    boxes = bounding_boxes(dilate(shapes, LOOSE))
    ellipses = ellipses_around(bounding_boxes(dilate(shapes, TIGHT)))
    is_box = (torch.arange(len(shapes), device=shapes.device) % 4 < 2)[:, None, None]  # for animals and garments alike
    return {
        "tight": dilate(shapes, TIGHT),
        "grown": dilate(shapes, GROWN),
        "loose": torch.where(is_box, boxes, ellipses),
    }


def ellipses_around(boxes: Tensor) -> Tensor:
    """The ellipses through the corners of box masks [N, H, W]."""
    y, x = (line.to(boxes.device) for line in grid())
    rows, columns = boxes.any(2, keepdim=True), boxes.any(1, keepdim=True)
    height, width = (line.sum((1, 2), keepdim=True) for line in (rows, columns))  # pixels
    middle_y = (y * rows).sum(1, keepdim=True) / height
    middle_x = (x * columns).sum(2, keepdim=True) / width
    return ((y - middle_y) * SIZE / height).square() + ((x - middle_x) * SIZE / width).square() < 0.5

"""Sheets of pictures with their prompts: samples from text, removals, and edits of example photographs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Generator, Tensor

from training.measure.bench import SIZE
from training.measure.masks import box_masks, ellipse_masks, scribble_masks

TILE = 176
LABEL, GAP = 18, 4
TINT = torch.tensor([40.0, 225.0, 205.0]).view(3, 1, 1)  # seldom in photographs
REMOVAL_WORDS = ("background", "nothing", "")
SHAPES = {"box": box_masks, "ellipse": ellipse_masks, "scribble": scribble_masks}
OUTLINE_SHARE = (0.02, 0.6)  # of a crop that a mask drawn by hand has to cover


def tile(picture: Tensor, text: str, size: int = TILE) -> Image.Image:
    """One picture [3, H, W] uint8 with a line of text below."""
    image = Image.new("RGB", (size, size + LABEL), "white")
    pixels = Image.fromarray(picture.cpu().permute(1, 2, 0).numpy())
    image.paste(pixels.resize((size, size), Image.Resampling.LANCZOS), (0, 0))
    ImageDraw.Draw(image).text((2, size + 2), text, fill="black", font=ImageFont.load_default(11))
    return image


def sheet(tiles: Sequence[Image.Image], columns: int) -> Image.Image:
    width, height = (side + GAP for side in tiles[0].size)
    image = Image.new("RGB", (columns * width, -(-len(tiles) // columns) * height), "white")
    for i, one in enumerate(tiles):
        image.paste(one, (i % columns * width, i // columns * height))
    return image


def short(prompt: str) -> str:
    return prompt.removeprefix("a photo of ") or "(no prompt)"


def tinted(picture: Tensor, mask: Tensor) -> Tensor:
    """The picture with its mask shown."""
    picture, mask = picture.cpu(), mask.cpu()
    return torch.where(mask, 0.45 * picture.float() + 0.55 * TINT, picture.float()).byte()


def sample_sheet(pictures: Tensor, prompts: Sequence[str]) -> Image.Image:
    tiles = [tile(p, short(prompt), SIZE) for p, prompt in zip(pictures, prompts, strict=True)]
    return sheet(tiles, min(8, len(tiles)))


def compared_sheet(
    pictures: Tensor, masks: Tensor, prompts: Sequence[str], results: dict[str, Tensor], with_input: bool = True
) -> Image.Image:
    """One group of tiles for each edit: the picture, its mask, and what each model made of it."""
    tiles = []
    for i, prompt in enumerate(prompts):
        shown = tile(tinted(pictures[i], masks[i]), short(prompt))
        tiles += [tile(pictures[i], "input"), shown] if with_input else [shown]
        tiles += [tile(made[i], name) for name, made in results.items()]
    in_group = len(tiles) // len(prompts)
    return sheet(tiles, in_group * max(1, 9 // in_group))


@dataclass
class RandomEdits:
    pictures: Tensor  # [N, 3, 256, 256] uint8
    masks: Tensor  # [N, 256, 256] bool
    prompts: list[str]


def random_edits(folder: Path, captions: Sequence[str], num: int, seed: int) -> RandomEdits:
    """Random crops of the photographs in a folder, with random masks and prompts. One in three asks for a removal."""
    photos = [path for path in sorted(folder.iterdir()) if is_photo(path)]
    draw = random.Random(seed)
    pictures, masks, prompts = [], [], []
    for _ in range(num):
        picture, outline = random_crop(draw.choice(photos), draw)
        kinds = [*SHAPES, *(["outline"] if outline is not None else [])]
        kind = draw.choice(kinds)
        drawn = Generator().manual_seed(draw.randrange(2**31))
        pictures.append(picture)
        masks.append(outline if kind == "outline" and outline is not None else SHAPES[kind](1, drawn)[0])
        prompts.append(draw.choice(REMOVAL_WORDS) if draw.random() < 1 / 3 else draw.choice(captions))
    return RandomEdits(torch.stack(pictures), torch.stack(masks), prompts)


def is_photo(path: Path) -> bool:
    """True for NAME.png and the like; masks and thumbnails have a second dot in their names."""
    return path.suffix in (".png", ".jpg", ".jpeg", ".webp") and "." not in path.stem


def random_crop(path: Path, draw: random.Random) -> tuple[Tensor, Tensor | None]:
    """A square crop at the model's size, and the mask that lies beside the photograph if it suits the crop."""
    image = Image.open(path).convert("RGB")
    side = round(draw.uniform(0.6, 1) * min(image.size))
    left, top = draw.randint(0, image.width - side), draw.randint(0, image.height - side)
    box = (left, top, left + side, top + side)
    small = image.resize((SIZE, SIZE), Image.Resampling.LANCZOS, box=box)
    picture = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    beside = path.with_suffix(".mask.png")
    if not beside.exists():
        return picture, None
    hole = Image.open(beside).convert("RGBA").getchannel("A").resize(image.size)  # transparent = edit
    mask = torch.from_numpy(np.array(hole.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)) < 128)
    suits = OUTLINE_SHARE[0] < mask.float().mean().item() < OUTLINE_SHARE[1]
    return picture, mask if suits else None

"""Sheets of pictures the model made itself: text-to-image samples and edits of its own samples, with their prompts."""

from collections.abc import Callable

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIZE = 256
LABEL = 20
TINT = torch.tensor([0.9, 0.1, 0.3]).view(3, 1, 1)

# source prompt, mask, three prompts
EDITS = (
    ("a photo of a Siamese cat", "ellipse", "a photo of a Bengal cat", "a photo of a Beagle dog", "background"),
    ("a photo of a Samoyed dog", "ellipse", "a photo of a Pug dog", "a photo of a Persian cat", "background"),
    ("a photo of a Russian Blue cat", "box", "a photo of a Maine Coon cat", "a photo of a Ragdoll cat", "background"),
    ("a photo of a dandelion", "box", "a photo of a sunflower", "a photo of a tulip", "a photo of a rose"),
    ("a photo of a sunflower", "ellipse", "a photo of a daisy", "a photo of a rose", "background"),
    ("a photo of a white t-shirt", "box", "a photo of a red t-shirt", "a photo of a blue t-shirt", "background"),
    ("a photo of a blue dress", "ellipse", "a photo of a red dress", "a photo of a black hoodie", "background"),
    ("a photo of a black hat", "stroke", "a photo of a red hat", "a photo of a yellow hat", "background"),
)

Fill = Callable[[Tensor, Tensor, list[str]], Tensor]


def tile(picture: Tensor, text: str) -> Image.Image:
    """One picture [3, H, W] with its prompt below."""
    pixels = (picture.cpu() * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.new("RGB", (SIZE, SIZE + LABEL), "white")
    image.paste(Image.fromarray(pixels), (0, 0))
    ImageDraw.Draw(image).text((4, SIZE + 3), text, fill="black", font=ImageFont.load_default(13))
    return image


def sheet(tiles: list[Image.Image], columns: int) -> Image.Image:
    rows = -(-len(tiles) // columns)
    image = Image.new("RGB", (columns * (SIZE + 4), rows * (SIZE + LABEL + 4)), "white")
    for i, one in enumerate(tiles):
        image.paste(one, (i % columns * (SIZE + 4), i // columns * (SIZE + LABEL + 4)))
    return image


def short(prompt: str) -> str:
    return prompt.removeprefix("a photo of ")


def sample_sheet(fill: Fill, prompts: list[str], device: str) -> Image.Image:
    blank = torch.full((len(prompts), 3, SIZE, SIZE), 0.5, device=device)
    pictures = fill(blank, torch.ones(len(prompts), SIZE, SIZE, dtype=torch.bool, device=device), prompts)
    return sheet([tile(p, short(prompt)) for p, prompt in zip(pictures, prompts, strict=True)], columns=8)


def edit_sheet(fill: Fill, device: str, num_rows: int) -> Image.Image:
    rows = EDITS[:num_rows]
    blank = torch.full((len(rows), 3, SIZE, SIZE), 0.5, device=device)
    full = torch.ones(len(rows), SIZE, SIZE, dtype=torch.bool, device=device)
    sources = fill(blank, full, [row[0] for row in rows])
    masks = torch.stack([SHAPES[row[1]]() for row in rows]).to(device)
    edits = [fill(sources, masks, [row[i] for row in rows]) for i in (2, 3, 4)]
    shown = torch.where(masks[:, None], 0.45 * sources + 0.55 * TINT.to(device), sources)
    tiles = []
    for i, (source, mask, *prompts) in enumerate(rows):
        tiles += [tile(sources[i], short(source)), tile(shown[i], f"mask: {mask}")]
        tiles += [tile(edit[i], short(prompt)) for edit, prompt in zip(edits, prompts, strict=True)]
    return sheet(tiles, columns=5)


def _grid() -> tuple[Tensor, Tensor]:
    line = (torch.arange(SIZE) + 0.5) / SIZE
    return line[:, None], line[None, :]


def _ellipse() -> Tensor:
    y, x = _grid()
    return ((y - 0.52) / 0.36).square() + ((x - 0.5) / 0.34).square() < 1


def _box() -> Tensor:
    y, x = _grid()
    return ((y - 0.5).abs() < 0.3) & ((x - 0.5).abs() < 0.3)


def _stroke() -> Tensor:
    y, x = _grid()
    return ((y - 0.45 - 0.08 * torch.sin(9 * x)).abs() < 0.2) & ((x - 0.5).abs() < 0.36)


SHAPES = {"ellipse": _ellipse, "box": _box, "stroke": _stroke}

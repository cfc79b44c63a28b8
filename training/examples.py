"""Training examples: a picture, a mask and a caption that says what the masked part shows.

Most examples mask a photograph as it is. Two kinds contradict their surroundings on purpose, so that the model learns
to believe the caption: a pet cut out of one photograph and pasted into another, and a garment given another colour. One
kind masks background only and says so, or says nothing: that is how an object is removed later.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from training import masks
from training.data import BACKGROUND_CAPTIONS, COLOURS, Photos, caption_variants, recoloured

PASTED_SHARE, RECOLOURED_SHARE, CAPTION_DROPOUT = 0.15, 0.05, 0.1
KINDS = ("full", "box", "outline", "shape", "stroke", "thin", "scattered", "none", "background")
KIND_SHARES = (0.26, 0.18, 0.19, 0.07, 0.12, 0.05, 0.05, 0.02, 0.06)
COLOUR_VALUES = (
    (0.08, 0.08, 0.09), (0.93, 0.93, 0.93), (0.52, 0.52, 0.53), (0.75, 0.1, 0.13), (0.95, 0.5, 0.1), (0.95, 0.85, 0.2),
    (0.15, 0.5, 0.2), (0.15, 0.27, 0.65), (0.45, 0.2, 0.6), (0.95, 0.6, 0.7), (0.45, 0.28, 0.15),
)  # fmt: skip


@dataclass
class Examples:
    pictures: Tensor  # [B, 3, height, width] in [-1, 1]
    masks: Tensor  # [B, height, width] bool
    texts: Tensor  # [B] row of the caption table
    rows: Tensor  # [B] the photograph it comes from
    theta: Tensor  # [B, 2, 3] how the photograph was cropped
    untouched: Tensor  # [B] bool: the photograph as it is, nothing pasted or recoloured


class Captions:
    """Every caption the examples can carry, as one list; row 0 is the empty one."""

    def __init__(self, photos: Photos) -> None:
        rows = {"": 0}
        for text in BACKGROUND_CAPTIONS:
            rows.setdefault(text, len(rows))
        self.num_background = len(rows) - 1
        variants, colours = [], []
        for caption, label, species, colour in zip(
            photos.captions, photos.labels, photos.species, photos.colours, strict=True
        ):
            texts = caption_variants(caption, label, species)
            variants.append([rows.setdefault(text, len(rows)) for text in texts])
            new = [recoloured(texts[0], colour, c) if colour else texts[0] for c in COLOURS]
            colours.append([rows.setdefault(text, len(rows)) for text in new])
        self.texts = list(rows)
        self.variants = torch.tensor(variants)  # [N, 8]
        self.colours = torch.tensor(colours)  # [N, 11]


class ExampleSource:
    def __init__(self, photos: Photos, captions: Captions, generator: Generator) -> None:
        device = generator.device
        self.photos, self.captions, self.generator = photos.to(device), captions, generator
        self.variants, self.colours = captions.variants.to(device), captions.colours.to(device)
        self.is_pet = photos.outlines.flatten(1).any(1)
        self.pets = self.is_pet.nonzero()[:, 0]
        edge = torch.ones(256, 256, dtype=torch.bool, device=device)
        edge[2:-2, 2:-2] = False
        touching = (photos.outlines & edge).flatten(1).sum(1)
        self.whole_pets = (self.is_pet & (touching < 40)).nonzero()[:, 0]
        self.coloured = torch.tensor([i for i, c in enumerate(photos.colours) if c], device=device, dtype=torch.long)
        self.palette = torch.tensor(COLOUR_VALUES, device=device)

    def draw(self, num: int, height: int, width: int) -> Examples:
        rows = self._integers(len(self.photos), num)
        num_recoloured = round(num * RECOLOURED_SHARE) if len(self.coloured) else 0
        num_pasted = round(num * PASTED_SHARE) if len(self.whole_pets) else 0
        if num_recoloured:
            rows[:num_recoloured] = self._pick(self.coloured, num_recoloured)
        theta = self._theta(num, height, width)
        pictures = self._view(self.photos.pictures[rows], theta, height, width)
        outlines = self._outline_view(rows, theta, height, width)
        texts = self.variants[rows, self._integers(self.variants.shape[1], num)]
        mask, background = self._masks(outlines, self.is_pet[rows])
        texts = torch.where(background, self._background_texts(num), texts)
        if num_recoloured:
            part = slice(0, num_recoloured)
            pictures[part], texts[part] = self._recolour(pictures[part], mask[part], rows[part])
        if num_pasted:
            part = slice(num_recoloured, num_recoloured + num_pasted)
            pictures[part], mask[part], texts[part] = self._paste(pictures[part])
        texts = torch.where(self._uniform((num,), 0, 1) < CAPTION_DROPOUT, 0, texts)
        untouched = torch.arange(num, device=rows.device) >= num_recoloured + num_pasted
        return Examples(pictures, mask, texts, rows, theta, untouched)

    def _masks(self, outlines: Tensor, is_pet: Tensor) -> tuple[Tensor, Tensor]:
        """One mask a picture, of a random kind; and which of them cover background only."""
        num, height, width = outlines.shape
        shares = torch.tensor(KIND_SHARES, device=outlines.device)
        kind = torch.multinomial(shares, num, replacement=True, generator=self.generator)
        foreign = self._outline_view(
            self._pick(self.pets, num) if len(self.pets) else self._integers(len(self.photos), num),
            self._placement(num, 0.5, 1.1),
            height,
            width,
        )
        stroke = masks.strokes(num, height, width, (0.03, 0.15), self.generator)
        grown = masks.dilate(outlines, int(self._integers(17, 1)))
        shape = foreign | (stroke & ~is_pet[:, None, None])
        made = {
            "full": torch.ones_like(outlines),
            "box": masks.boxes(num, height, width, self.generator),
            "outline": torch.where(is_pet[:, None, None], grown, shape),
            "shape": shape,
            "stroke": stroke,
            "thin": masks.strokes(num, height, width, (0.008, 0.03), self.generator),
            "scattered": masks.scattered(num, height, width, self.generator),
            "none": torch.zeros_like(outlines),
            "background": (foreign | stroke) & ~masks.dilate(outlines, 6),
        }
        mask = torch.zeros_like(outlines)
        for i, name in enumerate(KINDS):
            mask = torch.where((kind == i)[:, None, None], made[name], mask)
        return mask, (kind == KINDS.index("background")) & is_pet

    def _background_texts(self, num: int) -> Tensor:
        """The empty caption half of the time."""
        named = 1 + self._integers(self.captions.num_background, num)
        return torch.where(self._uniform((num,), 0, 1) < 0.5, 0, named)

    def _recolour(self, pictures: Tensor, mask: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the garment another colour inside the mask, its shading kept."""
        colour = self._integers(len(COLOURS), len(rows))
        value = self.palette[colour] + self._uniform((len(rows), 3), -0.07, 0.07)
        picture = (pictures + 1) / 2
        edges = torch.cat([picture[..., :8], picture[..., -8:]], -1).flatten(2).median(2).values
        garment = (picture - edges[:, :, None, None]).abs().mean(1) > 0.1
        light = picture.mean(1)
        mean = (light * garment).sum((1, 2)) / garment.sum((1, 2)).clamp(min=1)
        shading = (light / mean[:, None, None].clamp(min=0.05)).clamp(0.3, 1.7)
        tinted = (value[:, :, None, None] * shading[:, None]).clamp(0, 1) * 2 - 1
        return torch.where((garment & mask)[:, None], tinted, pictures), self.colours[rows, colour]

    def _paste(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Another photograph's pet, cut out and put into each picture; the mask is its outline or its box."""
        num, _, height, width = pictures.shape
        rows = self._pick(self.whole_pets, num)
        theta = self._placement(num, 0.5, 1.0)
        pet = self._view(self.photos.pictures[rows], theta, height, width)
        outline = self._outline_view(rows, theta, height, width)
        core = ~masks.dilate(~outline, 2)
        alpha = F.avg_pool2d(core[:, None].float(), 3, 1, 1)
        hole = masks.dilate(outline, 2 + int(self._integers(12, 1)))
        boxed = self._uniform((num,), 0, 1) < 0.5
        mask = torch.where(boxed[:, None, None], masks.bounding_boxes(hole), hole)
        texts = self.variants[rows, self._integers(self.variants.shape[1], num)]
        return pictures * (1 - alpha) + pet * alpha, mask, texts

    def _theta(self, num: int, height: int, width: int) -> Tensor:
        """A random crop of at least 88 % of the side, flipped half of the time: output to input coordinates."""
        scale = 1 - self._uniform((num,), 0, 0.12) * (self._uniform((num,), 0, 1) < 0.6)
        scale_x, scale_y = scale * min(1, width / height), scale * min(1, height / width)
        shift_x = self._uniform((num,), -1, 1) * (1 - scale_x)
        shift_y = self._uniform((num,), -1, 1) * (1 - scale_y)
        return self._affine(scale_x, scale_y, shift_x, shift_y)

    def _placement(self, num: int, low: float, high: float) -> Tensor:
        """The whole photograph, scaled and put somewhere."""
        size = self._uniform((num,), low, high)
        shift_x, shift_y = ((self._uniform((num,), -1, 1) * (1 - size).clamp(min=0)) / size for _ in range(2))
        return self._affine(1 / size, 1 / size, shift_x, shift_y)

    def _affine(self, scale_x: Tensor, scale_y: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
        flip = torch.where(self._uniform(scale_x.shape, 0, 1) < 0.5, -1.0, 1.0)
        zero = torch.zeros_like(scale_x)
        return torch.stack([flip * scale_x, zero, shift_x, zero, scale_y, shift_y], 1).view(-1, 2, 3)

    def _outline_view(self, rows: Tensor, theta: Tensor, height: int, width: int) -> Tensor:
        seen = self._view(self.photos.outlines[rows, None].to(torch.uint8) * 255, theta, height, width)
        return seen[:, 0] > 0

    @staticmethod
    def _view(pictures: Tensor, theta: Tensor, height: int, width: int) -> Tensor:
        """[B, C, 256, 256] uint8 -> [B, C, height, width] in [-1, 1]; -1 beyond the edge."""
        places = F.affine_grid(theta, [len(theta), 3, height, width], align_corners=False)
        seen = F.grid_sample(pictures.float() / 255, places, align_corners=False)
        return seen * 2 - 1

    def _integers(self, high: int, num: int) -> Tensor:
        return torch.randint(high, (num,), generator=self.generator, device=self.generator.device)

    def _pick(self, rows: Tensor, num: int) -> Tensor:
        return rows[self._integers(len(rows), num)]

    def _uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return masks.uniform(shape, low, high, self.generator)

"""Training examples: a picture, a mask and a caption of the masked part.

Most examples mask a photograph as it is. Two kinds contradict their surroundings on purpose, so that the model learns
to believe the caption: a pet or a flower out of one photograph put into another, and a garment given another colour.
One kind masks background only and says so, or says nothing: that is how an object is removed later. It is taken from
photographs of every sort, mostly in the shape of a pet, so that neither the word nor the shape comes to mean a pet.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from instgenie.bench.photos import Photos
from training import masks
from training.data import BACKGROUND_CAPTIONS, COLOURS, caption_variants, recoloured

PASTED_PETS, PASTED_FLOWERS, RECOLOURED, CAPTION_DROPOUT = 0.08, 0.06, 0.06, 0.1
KINDS = ("full", "box", "outline", "shape", "stroke", "thin", "scattered", "none", "background")
KIND_SHARES = (0.26, 0.18, 0.17, 0.05, 0.11, 0.05, 0.05, 0.02, 0.11)
COLOUR_VALUES = (
    (0.08, 0.08, 0.09), (0.93, 0.93, 0.93), (0.52, 0.52, 0.53), (0.75, 0.1, 0.13), (0.95, 0.5, 0.1), (0.95, 0.85, 0.2),
    (0.15, 0.5, 0.2), (0.15, 0.27, 0.65), (0.45, 0.2, 0.6), (0.95, 0.6, 0.7), (0.45, 0.28, 0.15),
)  # fmt: skip


@dataclass
class Examples:
    pictures: Tensor  # [B, 3, height, width] in [-1, 1]
    masks: Tensor  # [B, height, width] bool
    texts: Tensor  # [B] row of the caption table
    rows: Tensor  # [B] index of the photograph
    theta: Tensor  # [B, 2, 3] how the photograph was cropped
    untouched: Tensor  # [B] bool: the photograph as it is, nothing pasted or recoloured


class Captions:
    """A table of all captions that examples can have; row 0 is the empty caption."""

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
        self.is_clothing = torch.tensor([s == "clothing" for s in photos.species], device=device)
        self.flowers = torch.tensor([i for i, s in enumerate(photos.species) if s == "flower"], device=device)
        self.whole_pets = (self.is_pet & (touching < 40)).nonzero()[:, 0]
        self.coloured = torch.tensor([i for i, c in enumerate(photos.colours) if c], device=device, dtype=torch.long)
        self.palette = torch.tensor(COLOUR_VALUES, device=device)

    def draw(self, num: int, height: int, width: int) -> Examples:
        recoloured, pets, flowers = self._parts(num)
        rows = self._integers(len(self.photos), num)
        if rows[recoloured].numel():
            rows[recoloured] = self._pick(self.coloured, len(rows[recoloured]))
        theta = self._theta(num, height, width)
        pictures = self._view(self.photos.pictures[rows], theta, height, width)
        outlines = self._outline_view(rows, theta, height, width)
        texts = self.variants[rows, self._integers(self.variants.shape[1], num)]
        things = torch.where(self.is_clothing[rows][:, None, None], self._garments(pictures), outlines)
        mask, is_background, is_outline = self._masks(outlines, things, self.is_pet[rows])
        # Without a caption, a pet-shaped hole means to continue the surroundings: true outlines keep their caption.
        texts = torch.where(self._chance(num, CAPTION_DROPOUT) & ~is_outline, 0, texts)
        texts = torch.where(is_background, self._background_texts(num), texts)
        # Content that contradicts its surroundings keeps its caption: an empty one means to continue them.
        if rows[recoloured].numel():
            garment = self._garments(pictures[recoloured])
            mask[recoloured] = self._garment_masks(mask[recoloured], garment)
            where = mask[recoloured] & garment
            pictures[recoloured], texts[recoloured] = self._recolour(pictures[recoloured], where, rows[recoloured])
        for part, paste in ((pets, self._paste_pets), (flowers, self._paste_flowers)):
            if rows[part].numel():
                pictures[part], mask[part], texts[part] = paste(pictures[part])
        untouched = torch.arange(num, device=rows.device) >= flowers.stop
        return Examples(pictures, mask, texts, rows, theta, untouched)

    def _parts(self, num: int) -> tuple[slice, slice, slice]:
        """Draw which examples are recoloured, have a pasted pet or a pasted flower; the others are plain."""
        num_recoloured = round(num * RECOLOURED) if len(self.coloured) else 0
        num_pets = round(num * PASTED_PETS) if len(self.whole_pets) else 0
        num_flowers = round(num * PASTED_FLOWERS) if len(self.flowers) else 0
        first, second = num_recoloured + num_pets, num_recoloured + num_pets + num_flowers
        return slice(0, num_recoloured), slice(num_recoloured, first), slice(first, second)

    def _masks(self, outlines: Tensor, things: Tensor, is_pet: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One mask per picture, of a random kind; also which masks are background only, and which a pet's outline."""
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
            "background": (foreign | (stroke & self._chance(num, 0.3)[:, None, None])) & ~masks.dilate(things, 6),
        }
        mask = torch.zeros_like(outlines)
        for i, name in enumerate(KINDS):
            mask = torch.where((kind == i)[:, None, None], made[name], mask)
        return mask, kind == KINDS.index("background"), (kind == KINDS.index("outline")) & is_pet

    def _background_texts(self, num: int) -> Tensor:
        """A background caption, empty half of the time."""
        named = 1 + self._integers(self.captions.num_background, num)
        return torch.where(self._chance(num, 0.5), 0, named)

    def _garments(self, pictures: Tensor) -> Tensor:
        """[B, H, W] bool: pixels that differ from the left and right edges of the picture."""
        edges = torch.cat([pictures[..., :8], pictures[..., -8:]], -1).flatten(2).median(2).values
        return (pictures - edges[:, :, None, None]).abs().mean(1) > 0.2

    def _garment_masks(self, mask: Tensor, garment: Tensor) -> Tensor:
        """The whole garment most of the time, so that a new colour seldom ends inside it."""
        whole = masks.dilate(garment, 4)
        return torch.where(self._chance(len(mask), 0.6)[:, None, None], whole, mask)

    def _recolour(self, pictures: Tensor, where: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Give a garment another colour; its shading is kept, and made stronger where the cloth was pale."""
        colour = self._integers(len(COLOURS), len(rows))
        value = self.palette[colour] + self._uniform((len(rows), 3), -0.07, 0.07)
        light = (pictures.mean(1) + 1) / 2
        mean = (light * where).sum((1, 2)) / where.sum((1, 2)).clamp(min=1)
        shading = light / mean[:, None, None].clamp(min=0.05)
        shading = (1 + (1 + mean[:, None, None]) * (shading - 1)).clamp(0.2, 1.8)
        tinted = (value[:, :, None, None] * shading[:, None]).clamp(0, 1) * 2 - 1
        return torch.where(where[:, None], tinted, pictures), self.colours[rows, colour]

    def _paste_pets(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Paste the pet of another photograph, cut out along its outline."""
        num, _, height, width = pictures.shape
        rows, theta = self._pick(self.whole_pets, num), self._placement(num, 0.5, 1.0)
        outline = self._outline_view(rows, theta, height, width)
        alpha = F.avg_pool2d((~masks.dilate(~outline, 2))[:, None].float(), 3, 1, 1)
        return self._paste(pictures, rows, theta, alpha, outline)

    def _paste_flowers(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Paste the middle of a flower photograph, fading out along an ellipse."""
        num, _, height, width = pictures.shape
        rows, theta = self._pick(self.flowers, num), self._placement(num, 0.4, 0.9)
        places = F.affine_grid(theta, [num, 1, height, width], align_corners=False)  # where each pixel comes from
        reach = places.square().sum(-1).sqrt()  # 1 at the edges of the pasted photograph
        alpha = ((0.95 - reach) / 0.3).clamp(0, 1)[:, None]
        return self._paste(pictures, rows, theta, alpha, reach < 0.95)

    def _paste(
        self, pictures: Tensor, rows: Tensor, theta: Tensor, alpha: Tensor, shape: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mask of a pasted object: its shape or its box, with room around it; an object need not fill its mask."""
        num, _, height, width = pictures.shape
        pasted = self._view(self.photos.pictures[rows], theta, height, width)
        near, far = (masks.dilate(shape, low + int(self._integers(high, 1))) for low, high in ((2, 12), (12, 36)))
        hole = torch.where(self._chance(num, 0.5)[:, None, None], near, far)
        mask = torch.where(self._chance(num, 0.5)[:, None, None], masks.bounding_boxes(hole), hole)
        texts = self.variants[rows, self._integers(self.variants.shape[1], num)]
        return pictures * (1 - alpha) + pasted * alpha, mask, texts

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
        flip = torch.where(self._chance(len(scale_x), 0.5), -1.0, 1.0)
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

    def _chance(self, num: int, share: float) -> Tensor:
        return self._uniform((num,), 0, 1) < share

    def _uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return masks.uniform(shape, low, high, self.generator)

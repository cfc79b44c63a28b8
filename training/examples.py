"""Training examples: a picture, a mask and a caption of the masked part.

Most examples mask a photograph as it is. Three kinds contradict their surroundings on purpose, so that the model learns
to believe the caption: a pet, a flower or a garment out of one photograph put into another, inside a mask that it need
not fill; and a garment given another colour. Two kinds teach removal, and say `background` or nothing: masks over the
background of photographs of every sort, and scenes from which an object is to go, whose remains may stick out of the
mask.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from instgenie.bench.photos import Photos
from training import masks
from training.colours import COLOURS, photo_colours
from training.cutouts import Cutouts, Pasted, differs_from_edges, soft
from training.data import BACKGROUND_CAPTIONS, NUM_PLACELESS, NUM_VARIANTS, caption_variants, recoloured
from training.views import Draw, outline_view, view

SHARES = {"pet": 0.5, "flower": 0.17, "clothing": 0.18, "scene": 0.15}  # of the photographs that are drawn
PARTS = {"recoloured": 0.07, "pets": 0.08, "flowers": 0.08, "garments": 0.1, "removal": 0.12}  # the rest is plain
PASTED = {"pets": (0.4, 1.0), "flowers": (0.4, 1.0), "garments": (0.5, 1.1)}  # smallest and largest size
RIVAL_SHARE = 0.5  # flowers and garments that are pasted into photographs of their own kind
FOREIGN_SHARE = 0.25  # masks around what is pasted that have another object's outline, too: a shape is no promise
LEAST_RECOLOURED = 0.15  # share of a garment that a mask must cover if the garment is to have another colour there
CAPTION_DROPOUT, FULL_CAPTION_DROPOUT = 0.06, 0.1
KINDS = ("full", "box", "ellipse", "outline", "shape", "stroke", "thin", "scattered", "none", "background")
KIND_SHARES = (0.26, 0.12, 0.07, 0.17, 0.05, 0.1, 0.05, 0.05, 0.02, 0.11)
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
        background = [0] * (NUM_VARIANTS - self.num_background) + list(range(1, len(rows)))
        subjects, behind = photo_colours(photos)
        variants, colours = [], []
        for i, (caption, label, species) in enumerate(zip(photos.captions, photos.labels, photos.species, strict=True)):
            new = [0] * 2 * len(COLOURS)
            if species == "scene":
                variants.append(background)
            else:
                texts = caption_variants(caption, label, species, subjects[i], behind[i])
                variants.append([rows.setdefault(text, len(rows)) for text in texts])
            if species == "clothing":
                whole = [recoloured(caption, photos.colours[i], colour) for colour in COLOURS]
                new = [
                    rows.setdefault(t, len(rows)) for text in whole for t in (text, text.removeprefix("a photo of "))
                ]
            colours.append(new)
        self.texts = list(rows)
        self.variants = torch.tensor(variants)  # [N, 16]
        self.colours = torch.tensor(colours).view(-1, len(COLOURS), 2)  # [N, 11, 2]: of garments, two wordings each


class ExampleSource:
    def __init__(self, photos: Photos, captions: Captions, generator: Generator) -> None:
        device = generator.device
        self.photos, self.captions, self.draw_of = photos.to(device), captions, Draw(generator)
        self.generator = generator
        self.cutouts = Cutouts(self.photos, self.draw_of)
        self.variants, self.colours = captions.variants.to(device), captions.colours.to(device)
        is_flower, self.is_clothing, self.is_scene = (
            torch.tensor([s == name for s in photos.species], device=device) for name in ("flower", "clothing", "scene")
        )
        groups = (~(is_flower | self.is_clothing | self.is_scene), is_flower, self.is_clothing, self.is_scene)
        self.weights = sum(
            group * (share / group.sum().clamp(min=1)) for group, share in zip(groups, SHARES.values(), strict=True)
        )
        scenes, cuts = self.is_scene.nonzero()[:, 0], self.cutouts
        self.has_outline = torch.zeros_like(is_flower)  # a pet's own, or a garment's
        self.has_outline[cuts.shapes] = True
        self.sources = {  # the photographs that each part takes
            "recoloured": cuts.clothing,
            "pets": cuts.pets,
            "flowers": cuts.flowers,
            "garments": cuts.garments,
            "removal": scenes if len(cuts.objects) else scenes[:0],
        }
        rivals = {"flowers": is_flower, "garments": self.is_clothing}
        self.below = {  # the photographs that a part changes, and how often it takes them instead of any
            "recoloured": (cuts.clothing, 1.0),
            "removal": (scenes, 1.0),
            **{name: (kind.nonzero()[:, 0], RIVAL_SHARE) for name, kind in rivals.items()},
        }
        self.palette = torch.tensor(COLOUR_VALUES, device=device)

    def draw(self, num: int, height: int, width: int) -> Examples:
        draw, parts = self.draw_of, self._parts(num)
        rows = torch.multinomial(self.weights, num, replacement=True, generator=self.generator)
        for name, (below, share) in self.below.items():
            if num_part := rows[parts[name]].numel():
                taken = draw.chance(num_part, share)
                rows[parts[name]] = torch.where(taken, draw.pick(below, num_part), rows[parts[name]])
        theta = draw.crop(num, height, width)
        pictures = draw.light(view(self.photos.pictures[rows], theta, height, width))
        outlines = outline_view(self.cutouts.outlines[rows], theta, height, width)
        outlines &= self.has_outline[rows][:, None, None]
        mask, texts = self._plain(pictures, rows, outlines)
        # Content that contradicts its surroundings keeps its caption: an empty one means to continue them.
        for name, part in parts.items():
            if rows[part].numel():
                changed = self._change(name, pictures[part], mask[part], rows[part], outlines[part])
                pictures[part], mask[part], texts[part] = changed
        untouched = torch.arange(num, device=rows.device) >= parts["removal"].stop
        return Examples(pictures, mask, texts, rows, theta, untouched)

    def _parts(self, num: int) -> dict[str, slice]:
        """Which examples are recoloured, have an object pasted, or lose one; the others are plain."""
        parts, start = {}, 0
        for name, share in PARTS.items():
            stop = start + (round(num * share) if len(self.sources[name]) else 0)
            parts[name], start = slice(start, stop), stop
        return parts

    def _plain(self, pictures: Tensor, rows: Tensor, outlines: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of random kinds and their captions."""
        draw, num = self.draw_of, len(rows)
        is_unknown = self.is_clothing[rows] & ~self.has_outline[rows]
        things = torch.where(is_unknown[:, None, None], differs_from_edges(pictures), outlines)
        mask, kind = self._masks(outlines, things, rows)
        texts = self.variants[rows, draw.integers(NUM_VARIANTS, num)]
        # Without a caption, a hole of a thing's shape means to continue the surroundings: outlines keep their caption.
        is_full = kind == KINDS.index("full")
        dropped = torch.where(is_full, draw.chance(num, FULL_CAPTION_DROPOUT), draw.chance(num, CAPTION_DROPOUT))
        is_outline = (kind == KINDS.index("outline")) & self.has_outline[rows]
        texts = torch.where(dropped & ~is_outline, 0, texts)
        return mask, torch.where(kind == KINDS.index("background"), self._background_texts(num), texts)

    def _masks(self, outlines: Tensor, things: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One mask per picture, of a random kind; a scene seldom is masked whole."""
        draw, (num, height, width) = self.draw_of, outlines.shape
        shares = torch.tensor(KIND_SHARES, device=outlines.device)
        kind = torch.multinomial(shares, num, replacement=True, generator=self.generator)
        is_whole_scene = self.is_scene[rows] & (kind == KINDS.index("full")) & draw.chance(num, 0.8)
        kind = torch.where(is_whole_scene, KINDS.index("shape"), kind)
        has_outline = self.has_outline[rows][:, None, None]
        foreign = self.cutouts.foreign(num, height, width)
        stroke = masks.strokes(num, height, width, (0.03, 0.15), self.generator)
        shape = foreign | (stroke & ~has_outline)
        made = {
            "full": torch.ones_like(outlines),
            "box": masks.boxes(num, height, width, self.generator),
            "ellipse": masks.inner_ellipses(masks.boxes(num, height, width, self.generator)),
            "outline": torch.where(has_outline, masks.dilate(outlines, draw.integer(0, 17)), shape),
            "shape": shape,
            "stroke": stroke,
            "thin": masks.strokes(num, height, width, (0.008, 0.03), self.generator),
            "scattered": masks.scattered(num, height, width, 2 ** draw.integer(3, 6), self.generator),
            "none": torch.zeros_like(outlines),
            "background": (foreign | (stroke & draw.chance(num, 0.3)[:, None, None])) & ~masks.dilate(things, 6),
        }
        mask = torch.zeros_like(outlines)
        for i, name in enumerate(KINDS):
            mask = torch.where((kind == i)[:, None, None], made[name], mask)
        return mask, kind

    def _background_texts(self, num: int) -> Tensor:
        """A background caption, empty half of the time."""
        named = 1 + self.draw_of.integers(self.captions.num_background, num)
        return torch.where(self.draw_of.chance(num, 0.5), 0, named)

    def _change(
        self, name: str, pictures: Tensor, mask: Tensor, rows: Tensor, outlines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if name == "recoloured":
            return self._recolour(pictures, mask, rows, outlines)
        if name == "removal":
            return self._remove(pictures)
        objects = self.draw_of.pick(self.sources[name], len(pictures))
        return self._put(self.cutouts.paste(pictures, objects, *PASTED[name]))

    def _recolour(self, pictures: Tensor, mask: Tensor, rows: Tensor, garment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give a garment another colour inside the mask, which is the whole garment at least half of the time.

        The garment's shading is kept, and made stronger where the cloth was pale.
        """
        draw, num = self.draw_of, len(rows)
        covered = (mask & garment).sum((1, 2)) / garment.sum((1, 2)).clamp(min=1)
        is_whole = draw.chance(num, 0.5) | (covered < LEAST_RECOLOURED)
        mask = torch.where(is_whole[:, None, None], masks.dilate(garment, draw.integer(2, 8)), mask)
        where = mask & masks.erode(garment, 1)
        colour = draw.integers(len(COLOURS), num)
        value = self.palette[colour] + draw.uniform((num, 1), -0.07, 0.07) + draw.uniform((num, 3), -0.02, 0.02)
        light = (pictures.mean(1) + 1) / 2
        mean = (light * where).sum((1, 2)) / where.sum((1, 2)).clamp(min=1)
        shading = light / mean[:, None, None].clamp(min=0.05)
        shading = (1 + (1 + mean[:, None, None]) * (shading - 1)).clamp(0.2, 1.8)
        tinted = (value[:, :, None, None] * shading[:, None]).clamp(0, 1) * 2 - 1
        share = soft(where) * mask[:, None]
        return torch.lerp(pictures, tinted, share), mask, self.colours[rows, colour, draw.integers(2, num)]

    def _put(self, pasted: Pasted) -> tuple[Tensor, Tensor, Tensor]:
        """An object that appears: its mask has its shape, a box, an ellipse or a scribble, with room around it. Some
        shapes are larger by the outline of another object at the same place."""
        draw, num = self.draw_of, len(pasted.rows)
        texts = self.variants[pasted.rows, draw.integers(NUM_PLACELESS, num)]
        others = self.cutouts.foreign(*pasted.shapes.shape, pasted.theta)
        shapes = pasted.shapes | (others & draw.chance(num, FOREIGN_SHARE)[:, None, None])
        return pasted.pictures, self._around(shapes, (2, 12), (12, 36)), texts

    def _remove(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An object that goes: inside the mask the scene as it was, outside what sticks out of a tight mask."""
        draw, num = self.draw_of, len(pictures)
        pasted = self.cutouts.paste(pictures, draw.pick(self.cutouts.objects, num), 0.25, 0.95)
        tight = masks.erode(pasted.shapes, draw.integer(0, 4))
        loose = self._around(pasted.shapes, (1, 10), (8, 28))
        mask = torch.where(draw.chance(num, 0.2)[:, None, None], tight, loose)
        return torch.where(mask[:, None], pictures, pasted.pictures), mask, self._background_texts(num)

    def _around(self, shapes: Tensor, near: tuple[int, int], far: tuple[int, int]) -> Tensor:
        """Masks that hold the shapes: grown a little or much, as they are, or as box, ellipse or scribble."""
        draw, (num, height, width) = self.draw_of, shapes.shape
        little, much = (masks.dilate(shapes, draw.integer(*reach)) for reach in (near, far))
        hole = torch.where(draw.chance(num, 0.5)[:, None, None], little, much)
        form = draw.integers(6, num)[:, None, None]
        mask = torch.where(form >= 4, masks.bounding_boxes(hole), hole)
        mask = torch.where(form == 3, masks.outer_ellipses(hole), mask)
        scribble = hole | masks.strokes(num, height, width, (0.03, 0.12), self.generator)
        return torch.where(form == 2, scribble, mask)

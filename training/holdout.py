"""Photographs kept out of training, with masks over them, and the tools that measure pictures against them. Probes are
fitted on real training photographs, so each accuracy stands beside its ceiling on real ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Generator, Tensor

from instgenie.bench.metrics import Features, Lpips, Probe, crop_to_masks
from instgenie.bench.photos import Photos
from training.masks import bounding_boxes, dilate, strokes
from training.sampling import fill

CROP_SIZE, CROP_PAD = 224, 8
LPIPS_SIZE = 192
CONTENT_EDGE = 20  # pixels of that frame
DILATION = 8
BATCH = {"cuda": 256, "cpu": 16}  # pictures at once, to suit the caches of the device
WORDS = ("captions", "labels", "species", "colours", "ids")


@dataclass
class MaskedPhotos:
    """Photographs with masks of one kind, and the probe that classifies crops around such masks."""

    photos: Photos
    pictures: Tensor  # [N, 3, 256, 256] in [0, 1]
    masks: Tensor  # [N, 256, 256] bool
    probe: Probe | None = None


@dataclass
class Bench:
    device: str
    steps: int
    seed: int
    pipe: Any
    features: Features
    lpips: Lpips
    console: Console = field(default_factory=Console)

    @property
    def batch(self) -> int:
        return BATCH[torch.device(self.device).type]

    def generator(self, salt: int) -> Generator:
        return Generator(device=self.device).manual_seed(self.seed * 1000 + salt)

    def batched(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function batch by batch on the device, and return one tensor."""
        parts = zip(*(tensor.split(self.batch) for tensor in tensors), strict=True)
        with torch.inference_mode():
            results = torch.cat([function(*(part.to(self.device) for part in row)) for row in parts])
        return results.clone()  # outside inference mode: the probe is fitted with gradients

    def embed(self, pictures: Tensor) -> Tensor:
        return self.batched(self.features, pictures)

    def embed_crops(self, pictures: Tensor, masks: Tensor) -> Tensor:
        return self.batched(lambda p, m: self.features(crop_to_masks(p, m, CROP_SIZE, CROP_PAD)), pictures, masks)

    def distance(self, a: Tensor, b: Tensor, masks: Tensor) -> float:
        def part(a: Tensor, b: Tensor, masks: Tensor) -> Tensor:
            chunks = zip(a.split(32), b.split(32), masks.split(32), strict=True)
            return torch.cat([self.lpips(*(crop_to_masks(x, m, LPIPS_SIZE) for x in (p, q))) for p, q, m in chunks])

        return self.batched(part, a, b, masks).mean().item()

    def edit(self, pictures: Tensor, masks: Tensor, prompts: list[str], guidance: float, salt: int) -> Tensor:
        results = []
        for start in range(0, len(prompts), self.batch):
            rows = slice(start, start + self.batch)
            seed = (self.seed * 1000 + salt) * 100_000 + start
            args = pictures[rows].to(self.device), masks[rows].to(self.device), prompts[rows]
            results.append(fill(self.pipe, *args, guidance=guidance, steps=self.steps, seed=seed))
        return torch.cat(results)

    def generate(self, prompts: list[str], guidance: float, salt: int) -> Tensor:
        blank = torch.full((1, 3, 256, 256), 0.5).expand(len(prompts), -1, -1, -1)
        return self.edit(blank, torch.ones(len(prompts), 256, 256, dtype=torch.bool), prompts, guidance, salt)


def unit(photos: Photos) -> Tensor:
    return photos.pictures.float() / 255


def subset(photos: Photos, keep: Sequence[int]) -> Photos:
    index = torch.tensor(keep, dtype=torch.long, device=photos.pictures.device)
    words = ([getattr(photos, name)[i] for i in keep] for name in WORDS)
    return Photos(photos.pictures[index], photos.outlines[index], *words)


def where(photos: Photos, *species: str) -> list[int]:
    return [i for i, name in enumerate(photos.species) if name in species]


def share(hits: Iterator[bool] | Sequence[bool]) -> float:
    hits = list(hits)
    return sum(hits) / len(hits) if hits else float("nan")


def accuracy(probe: Probe, features: Tensor, labels: Sequence[str]) -> float:
    return share([a == b for a, b in zip(probe.predict(features), labels, strict=True)])


def box_masks(num: int, generator: Generator) -> Tensor:
    """Boxes of 25 to 60 % of the picture, near its middle."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(num, 1, generator=generator, device=generator.device) * (high - low) + low

    area, aspect = uniform(0.25, 0.6), uniform(-0.3, 0.3).exp()
    line = (torch.arange(256, device=generator.device) + 0.5) / 256
    rows = (line - uniform(0.42, 0.58)).abs() < (area * aspect).sqrt() / 2
    columns = (line - uniform(0.42, 0.58)).abs() < (area / aspect).sqrt() / 2
    return rows[:, :, None] & columns[:, None, :]


def mask_outlines(photos: Photos) -> MaskedPhotos:
    pets = subset(photos, where(photos, "cat", "dog"))
    return MaskedPhotos(pets, unit(pets), dilate(pets.outlines, DILATION))


def mask_boxes(photos: Photos, generator: Generator) -> MaskedPhotos:
    return MaskedPhotos(photos, unit(photos), box_masks(len(photos), generator))


def mask_content(photos: Photos) -> MaskedPhotos:
    """Boxes that hide everything a caption describes: around a pet, or all but a frame of the picture."""
    most = torch.zeros_like(photos.outlines)
    most[:, CONTENT_EDGE:-CONTENT_EDGE, CONTENT_EDGE:-CONTENT_EDGE] = True
    around = bounding_boxes(dilate(photos.outlines, DILATION))
    is_pet = photos.outlines.flatten(1).any(1)
    return MaskedPhotos(photos, unit(photos), torch.where(is_pet[:, None, None], around, most))


def mask_strokes(photos: Photos, generator: Generator) -> MaskedPhotos:
    return MaskedPhotos(photos, unit(photos), strokes(len(photos), 256, 256, (0.03, 0.09), generator))


def narrowed(masked: MaskedPhotos, *species: str) -> MaskedPhotos:
    keep = where(masked.photos, *species)
    return MaskedPhotos(subset(masked.photos, keep), masked.pictures[keep], masked.masks[keep], masked.probe)


def fit_crops(bench: Bench, train: MaskedPhotos, val: MaskedPhotos) -> float:
    """Fit the probe for such masks on real training crops, and return its accuracy on real validation crops."""
    val.probe = Probe().fit(bench.embed_crops(train.pictures, train.masks), train.photos.labels)
    return accuracy(val.probe, bench.embed_crops(val.pictures, val.masks), val.photos.labels)


@dataclass
class Context:
    """The photographs, and what is measured once of them: features, probes and ceilings."""

    train: Photos
    val: Photos
    train_features: Tensor
    val_features: Tensor
    probe: Probe
    ceiling: float
    outlines: MaskedPhotos
    boxes: MaskedPhotos
    content_boxes: MaskedPhotos
    strokes: MaskedPhotos
    crop_ceilings: dict[str, float]
    captions: dict[str, str]  # label -> its plainest caption
    labels: dict[str, list[str]]  # species -> its labels


def prepare(bench: Bench, train: Photos, val: Photos) -> Context:
    train_features, val_features = bench.embed(unit(train)), bench.embed(unit(val))
    probe = Probe().fit(train_features, train.labels)
    outlines, boxes, content_boxes = mask_outlines(val), mask_boxes(val, bench.generator(1)), mask_content(val)
    ceilings = {
        "outlines": fit_crops(bench, mask_outlines(train), outlines),
        "boxes": fit_crops(bench, mask_boxes(train, bench.generator(2)), boxes),
        "content boxes": fit_crops(bench, mask_content(train), content_boxes),
    }
    rows = sorted(set(zip(train.species, train.labels, train.captions, strict=True)), key=lambda row: -len(row[2]))
    labels = {s: sorted({label for species, label, _ in rows if species == s}) for s in sorted(set(train.species))}
    return Context(
        train=train,
        val=val,
        train_features=train_features,
        val_features=val_features,
        probe=probe,
        ceiling=accuracy(probe, val_features, val.labels),
        outlines=outlines,
        boxes=boxes,
        content_boxes=content_boxes,
        strokes=mask_strokes(val, bench.generator(3)),
        crop_ceilings=ceilings,
        captions={label: caption for _, label, caption in rows},
        labels=labels,
    )

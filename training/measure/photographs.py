"""Photographs kept out of training, with masks over them, and what is measured once of them. Probes are fitted on real
training photographs, so each accuracy stands beside its ceiling on real ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instgenie.bench.metrics import Probe
from instgenie.bench.photos import Photos, load_photos
from training.masks import dilate
from training.measure.bench import Bench, Values, accuracy, kid_values
from training.measure.masks import GROWTH, box_masks, content_masks, ellipse_masks, scribble_masks

WORDS = ("captions", "labels", "species", "colours", "ids")


@dataclass
class MaskedPhotos:
    """Photographs with masks of one kind, and the probe that classifies crops around such masks."""

    photos: Photos
    masks: Tensor  # [N, 256, 256] bool
    probe: Probe | None = None  # None: labels of such crops are not judged


@dataclass
class Holdout:
    train: Photos
    val: Photos
    train_features: Tensor
    val_features: Tensor
    probe: Probe
    masked: dict[str, MaskedPhotos]  # kind of mask -> photographs with such masks
    captions: dict[str, str]  # label -> its plainest caption
    labels: dict[str, list[str]]  # species -> its labels
    ceilings: Values  # the figures of real photographs


def subset(photos: Photos, keep: Sequence[int]) -> Photos:
    index = torch.tensor(keep, dtype=torch.long, device=photos.pictures.device)
    words = ([getattr(photos, name)[i] for i in keep] for name in WORDS)
    return Photos(photos.pictures[index], photos.outlines[index], *words)


def where(photos: Photos, *species: str) -> list[int]:
    return [i for i, name in enumerate(photos.species) if name in species]


def narrowed(masked: MaskedPhotos, *species: str) -> MaskedPhotos:
    keep = where(masked.photos, *species)
    return MaskedPhotos(subset(masked.photos, keep), masked.masks[keep], masked.probe)


def with_outlines(photos: Photos) -> MaskedPhotos:
    pets = subset(photos, where(photos, "cat", "dog"))
    return MaskedPhotos(pets, dilate(pets.outlines, GROWTH))


def prepare(bench: Bench, folder: str, num_train: int | None, num_val: int | None) -> Holdout:
    train = load_photos(folder, "train", num_train).to(bench.device)
    val = load_photos(folder, "val", num_val).to(bench.device)
    masked = {
        "outline": with_outlines(val),
        "box": MaskedPhotos(val, box_masks(len(val), bench.generator(1))),
        "content box": MaskedPhotos(val, content_masks(val.outlines)),
        "ellipse": MaskedPhotos(val, ellipse_masks(len(val), bench.generator(3))),
        "scribble": MaskedPhotos(val, scribble_masks(len(val), bench.generator(4))),
    }
    trained = {
        "outline": with_outlines(train),
        "box": MaskedPhotos(train, box_masks(len(train), bench.generator(2))),
        "content box": MaskedPhotos(train, content_masks(train.outlines)),
    }
    train_features, val_features = bench.embed(train.pictures), bench.embed(val.pictures)
    probe = Probe().fit(train_features, train.labels)
    ceilings = {
        "validation photographs": float(len(val)),
        "training photographs": float(len(train)),
        **kid_values("KID of training photographs", train_features, val_features),
        "probe accuracy": accuracy(probe, val_features, val.labels),
    }
    for kind, known in trained.items():
        held_out = masked[kind]
        held_out.probe = Probe().fit(bench.embed_crops(known.photos.pictures, known.masks), known.photos.labels)
        features = bench.embed_crops(held_out.photos.pictures, held_out.masks)
        ceilings[f"probe accuracy, {kind}"] = accuracy(held_out.probe, features, held_out.photos.labels)
    rows = sorted(set(zip(train.species, train.labels, train.captions, strict=True)), key=lambda row: -len(row[2]))
    return Holdout(
        train=train,
        val=val,
        train_features=train_features,
        val_features=val_features,
        probe=probe,
        masked=masked,
        captions={label: caption for _, label, caption in rows},
        labels={s: sorted({label for species, label, _ in rows if species == s}) for s in sorted(set(train.species))},
        ceilings=ceilings,
    )

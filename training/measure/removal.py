"""Figures of removal: the model is asked for the background where a thing was pasted into a scene."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from instgenie.bench.metrics import Probe
from training.measure.bench import Bench, Candidate, Values, kid_values, share
from training.measure.pasting import ANIMALS, KINDS, Removals, load_removals
from training.measure.photographs import Holdout, with_outlines

CAPTIONS = ("background", "nothing", "")
SCENE = "scene"
AROUND = ", from surroundings"
NUM_PROBE_SCENES, NUM_PROBE_PHOTOS = 800, 2000  # training scenes, and photographs whose things are pasted into them

Filled = dict[tuple[str, str], Tensor]  # kind of mask, caption -> pictures
Starts = dict[str, dict[str, Tensor] | None]  # what is added to the name of a figure -> kind of mask -> pictures


def fit_probe(bench: Bench, holdout: Holdout, folder: str | Path, limit: int | None) -> Probe:
    """A probe that names what a box shows: a species, or a scene. It is fitted on training scenes with a thing pasted
    in, on the same scenes without it, and on pets in their own photographs."""
    num_scenes = min(limit or NUM_PROBE_SCENES, NUM_PROBE_SCENES)
    known = load_removals(holdout.train, folder, "train", num_scenes, NUM_PROBE_PHOTOS)
    pets = with_outlines(holdout.train)
    features = [bench.embed_crops(pets.photos.pictures, pets.masks)]
    labels = list(pets.photos.species)
    for kind in KINDS:
        features += [bench.embed_crops(pictures, known.masks[kind]) for pictures in (known.pasted, known.scenes)]
        labels += [*known.species, *[SCENE] * len(known)]
    return Probe().fit(torch.cat(features), labels)


def real_figures(bench: Bench, removals: Removals, probe: Probe) -> Values:
    """How often the probe sees an animal in boxes without one, and in boxes with a pasted one."""
    real = [name for kind in KINDS for name in seen(bench, probe, removals.scenes, removals.masks[kind])]
    pasted = [name for kind in KINDS for name in seen(bench, probe, removals.pasted, removals.masks[kind])]
    has_animal = [name in ANIMALS for name in removals.species] * len(KINDS)
    return {
        "validation scenes": float(len(removals)),
        "animal seen, real boxes": share([name in ANIMALS for name in real]),
        "animal seen, boxes with a pasted animal": share(
            [name in ANIMALS for name, has in zip(pasted, has_animal, strict=True) if has]
        ),
    }


def seen(bench: Bench, probe: Probe, pictures: Tensor, masks: Tensor) -> Sequence[str]:
    return probe.predict(bench.embed_crops(pictures, masks))


def starts(bench: Bench, removals: Removals) -> Starts:
    """Fills start from noise, or from what is around their masks."""
    return {"": None, AROUND: {kind: bench.surroundings(removals.pasted, removals.masks[kind]) for kind in KINDS}}


def fill_all(bench: Bench, removals: Removals, candidate: Candidate, start: dict[str, Tensor] | None) -> Filled:
    """Every thing removed with every kind of mask and every caption, in one call, so that batches are full."""
    keys = [(kind, caption) for kind in KINDS for caption in CAPTIONS]
    masks = torch.cat([removals.masks[kind] for kind, _ in keys])
    prompts = [caption for _, caption in keys for _ in range(len(removals))]
    pictures = removals.pasted.repeat(len(keys), 1, 1, 1)
    contents = torch.cat([start[kind] for kind, _ in keys]) if start else None
    filled = bench.edit(candidate, pictures, masks, prompts, salt=30, contents=contents)
    return dict(zip(keys, filled.split(len(removals)), strict=True))


def removal_figures(bench: Bench, removals: Removals, probe: Probe, filled: Filled) -> Values:
    """LPIPS to the truth inside the mask, KID against the boxes of the truth, and boxes in which an animal is seen."""
    figures: Values = {}
    distances, made, real, names = [], [], [], []
    for kind in KINDS:
        masks = removals.masks[kind]
        pictures = torch.cat([filled[kind, caption] for caption in CAPTIONS])
        repeated = masks.repeat(len(CAPTIONS), 1, 1)
        distances.append(bench.lpips_inside(pictures, removals.scenes.repeat(len(CAPTIONS), 1, 1, 1), repeated))
        made.append(bench.embed_crops(pictures, repeated))
        real.append(bench.embed_crops(removals.scenes, masks))
        names += probe.predict(made[-1])
        figures |= {
            f"LPIPS, {kind}": distances[-1].mean().item(),
            **kid_values(f"KID, {kind}", made[-1], real[-1]),
            f"animal seen, {kind}": share([name in ANIMALS for name in names[-len(repeated) :]]),
        }
    return figures | {
        "LPIPS": torch.cat(distances).mean().item(),
        **kid_values("KID", torch.cat(made), torch.cat(real)),
        "animal seen": share([name in ANIMALS for name in names]),
        "filled boxes": float(len(names)),
    }

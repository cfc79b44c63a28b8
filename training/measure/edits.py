"""Figures of pictures made from captions, of edits with the true caption, and of prompts that contradict the
photograph."""

import random

import torch
from torch import Tensor

from instgenie.bench.metrics import border_jump
from training.measure.bench import Bench, Candidate, Values, accuracy, kid_values, share
from training.measure.photographs import Holdout, MaskedPhotos, narrowed

OTHER_PET = {"cat": "dog", "dog": "cat"}


def text_figures(bench: Bench, holdout: Holdout, candidate: Candidate) -> Values:
    """Two pictures of each validation caption; the nearest training photograph says whether one was memorised."""
    prompts, labels = holdout.val.captions * 2, holdout.val.labels * 2
    features = bench.embed(bench.generate(candidate, prompts, salt=1))
    near, real = nearest(features, holdout.train_features), nearest(holdout.val_features, holdout.train_features)
    return {
        **kid_values("KID", features, holdout.val_features),
        "probe accuracy": accuracy(holdout.probe, features, labels),
        "nearest training photograph, median": near.median().item(),
        "nearest training photograph, 5th percentile": near.quantile(0.05).item(),
        "nearest training photograph of validation photographs, median": real.median().item(),
        "nearest training photograph of validation photographs, 5th percentile": real.quantile(0.05).item(),
    }


def nearest(features: Tensor, train: Tensor) -> Tensor:
    """Cosine distance to the nearest training photograph."""
    unit_train = torch.nn.functional.normalize(train, dim=1)
    return 1 - (torch.nn.functional.normalize(features, dim=1) @ unit_train.T).amax(1)


def edit_figures(bench: Bench, holdout: Holdout, candidate: Candidate) -> Values:
    """Edits with the true caption, for each kind of mask; KID and saturation also over all kinds together."""
    figures: Values = {}
    made, real, colours = [], [], []
    for salt, (kind, masked) in enumerate(holdout.masked.items()):
        photos, originals, masks = masked.photos, masked.photos.pictures, masked.masks
        edited = bench.edit(candidate, originals, masks, photos.captions, 10 + salt)
        made.append(bench.embed_crops(edited, masks))
        real.append(bench.embed_crops(originals, masks))
        jumps = [bench.batched(border_jump, pictures, masks).nanmean() for pictures in (edited, originals)]
        colours.append(torch.stack([bench.batched(saturations, x, masks) for x in (edited, originals)]))
        figures |= {
            **kid_values(f"KID, {kind}", made[-1], real[-1]),
            f"border jump, {kind}": (jumps[0] / jumps[1]).item(),
            f"saturation, {kind}": ratio(colours[-1]),
        }
        if masked.probe:
            figures[f"LPIPS, {kind}"] = bench.lpips_inside(edited, originals, masks).mean().item()
            figures[f"probe accuracy, {kind}"] = accuracy(masked.probe, made[-1], photos.labels)
    figures |= kid_values("KID", torch.cat(made), torch.cat(real))
    figures["saturation"] = ratio(torch.cat(colours, 1))
    return figures


def saturations(pictures: Tensor, masks: Tensor) -> Tensor:
    """Mean distance of a masked pixel's largest and smallest channel: 0 is grey, 1 a pure colour."""
    chroma = pictures.amax(1) - pictures.amin(1)
    return (chroma * masks).sum((1, 2)) / masks.sum((1, 2)).clamp(min=1)


def ratio(values: Tensor) -> float:
    """[2, N] -> mean of the edits over mean of the photographs."""
    made, real = values.mean(1)
    return (made / real.clamp(min=1e-6)).item()


def prompt_figures(bench: Bench, holdout: Holdout, candidate: Candidate) -> Values:
    """How often the probe sees what a contradicting prompt asks for, and how often still the original."""
    pool, masked = holdout.labels, holdout.masked
    other = {a: pool[b] for a, b in OTHER_PET.items() if b in pool}
    cases = {
        "outline, another breed": (masked["outline"], pool),
        "outline, another species": (masked["outline"], other),
        "box, another flower": (narrowed(masked["box"], "flower"), pool),
        "box, another garment": (narrowed(masked["box"], "clothing"), pool),
    }
    figures = {}
    for salt, (name, (photos, choices)) in enumerate(cases.items()):
        follows, keeps = contradict(bench, candidate, holdout, photos, choices, salt)
        figures |= {name: follows, f"{name}, still the original": keeps}
    return figures


def contradict(
    bench: Bench, candidate: Candidate, holdout: Holdout, masked: MaskedPhotos, pool: dict[str, list[str]], salt: int
) -> tuple[float, float]:
    assert masked.probe is not None
    photos = masked.photos
    others = [
        [name for name in pool.get(species, ()) if name != label]
        for label, species in zip(photos.labels, photos.species, strict=True)
    ]
    if not all(others) or not others:
        return float("nan"), float("nan")  # a small set of photographs has no other label
    draw = random.Random(salt)
    wanted = [draw.choice(names) for names in others]
    edited = bench.edit(candidate, photos.pictures, masked.masks, [holdout.captions[n] for n in wanted], 20 + salt)
    predicted = masked.probe.predict(bench.embed_crops(edited, masked.masks))
    follows = share([p == w for p, w in zip(predicted, wanted, strict=True)])
    return follows, share([p == o for p, o in zip(predicted, photos.labels, strict=True)])

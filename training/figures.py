"""The figures of a trained pipeline: pictures made from captions, edits with and without their caption, prompts that
contradict the photograph, seams at mask borders, and the distance to the nearest training photograph."""

import random
from typing import Any

import torch
from torch import Tensor

from instgenie.bench.metrics import Probe, border_jump, kid, psnr, ssim
from training.holdout import Bench, Context, MaskedPhotos, accuracy, narrowed, share
from training.sampling import reconstruct

KID = "KID-EffLite0"
OTHER_PET = {"cat": "dog", "dog": "cat"}

Figures = dict[str, Any]


def model_figures(bench: Bench, context: Context, guidance: float) -> Figures:
    text, features, prompts = text_figures(bench, context, guidance)
    bench.console.log(f"guidance {guidance}: generated")
    sets = {"outlines": context.outlines, "boxes": context.boxes, "content boxes": context.content_boxes}
    edits = {
        name: edit_figures(bench, masked, context.crop_ceilings[name], guidance, 10 + salt)
        for salt, (name, masked) in enumerate(sets.items())
    }
    brushed = context.strokes
    told = bench.edit(brushed.pictures, brushed.masks, brushed.photos.captions, guidance, 15)
    edits["strokes"] = {"border jump": jump_figures(bench, told, brushed.pictures, brushed.masks)}
    bench.console.log(f"guidance {guidance}: edited")
    return {
        "text to image": text,
        "edits": edits,
        "contradicting prompts": contradictions(bench, context, guidance),
        "nearest training photograph": memory_figures(context, features, prompts),
    }


def real_figures(bench: Bench, context: Context, rebuilt: Tensor) -> Figures:
    floor, std = kid(context.train_features, context.val_features)
    val, rebuilt_features = context.val, bench.embed(rebuilt)
    return {
        "validation photographs": len(val),
        "training photographs": len(context.train),
        f"{KID} of training photographs": floor,
        f"{KID} of training photographs std": std,
        f"{KID} of reconstructions": kid(rebuilt_features, context.val_features)[0],
        "probe accuracy": context.ceiling,
        "probe accuracy by species": by_species(context.probe, context.val_features, val.labels, val.species),
        "probe accuracy of reconstructions": accuracy(context.probe, rebuilt_features, val.labels),
        "probe accuracy of crops": context.crop_ceilings,
    }


def autoencoder_figures(bench: Bench, pictures: Tensor) -> tuple[Figures, Tensor]:
    rebuilt = bench.batched(lambda x: reconstruct(bench.pipe, x), pictures)
    full = torch.ones(len(pictures), *pictures.shape[-2:], dtype=torch.bool)
    figures = {
        "psnr": bench.batched(psnr, rebuilt, pictures).mean().item(),
        "ssim": bench.batched(ssim, rebuilt, pictures).mean().item(),
        "lpips": bench.distance(rebuilt, pictures, full),
    }
    return figures, rebuilt


def text_figures(bench: Bench, context: Context, guidance: float) -> tuple[Figures, Tensor, list[str]]:
    val, probe = context.val, context.probe
    prompts, labels = val.captions * 2, val.labels * 2
    features = bench.embed(bench.generate(prompts, guidance, salt=1))
    mean, std = kid(features, context.val_features)
    correct = accuracy(probe, features, labels)
    figures = {
        KID: mean,
        f"{KID} std": std,
        "probe accuracy": correct,
        "share of ceiling": correct / max(context.ceiling, 1e-9),
        "probe accuracy by species": by_species(probe, features, labels, val.species * 2),
    }
    return figures, features, prompts


def by_species(probe: Probe, features: Tensor, labels: list[str], species: list[str]) -> dict[str, float]:
    hits = [a == b for a, b in zip(probe.predict(features), labels, strict=True)]
    return {name: share([h for h, s in zip(hits, species, strict=True) if s == name]) for name in sorted(set(species))}


def edit_figures(bench: Bench, masked: MaskedPhotos, ceiling: float, guidance: float, salt: int) -> Figures:
    photos, originals, masks = masked.photos, masked.pictures, masked.masks
    assert masked.probe is not None
    told = bench.edit(originals, masks, photos.captions, guidance, salt)
    untold = bench.edit(originals, masks, [""] * len(photos), guidance, salt)
    correct = accuracy(masked.probe, bench.embed_crops(told, masks), photos.labels)
    return {
        "probe accuracy": correct,
        "share of ceiling": correct / max(ceiling, 1e-9),
        "probe accuracy without prompt": accuracy(masked.probe, bench.embed_crops(untold, masks), photos.labels),
        "lpips true caption": bench.distance(told, originals, masks),
        "lpips without prompt": bench.distance(untold, originals, masks),
        "lpips mean colour": bench.distance(mean_colour(originals, masks), originals, masks),
        "border jump": jump_figures(bench, told, originals, masks),
    }


def mean_colour(pictures: Tensor, masks: Tensor) -> Tensor:
    outside = (~masks)[:, None].float()
    mean = (pictures * outside).sum((2, 3), keepdim=True) / outside.sum((2, 3), keepdim=True).clamp_min(1)
    return torch.where(masks[:, None], mean, pictures)


def jump_figures(bench: Bench, edited: Tensor, originals: Tensor, masks: Tensor) -> Figures:
    edit = bench.batched(border_jump, edited, masks)
    natural = bench.batched(border_jump, originals, masks)
    return {
        "edits": edit.nanmean().item(),
        "photographs": natural.nanmean().item(),
        "ratio": (edit.nanmean() / natural.nanmean()).item(),
        "edits p95": edit.nanquantile(0.95).item(),
        "photographs p95": natural.nanquantile(0.95).item(),
        "increase p95": (edit - natural).nanquantile(0.95).item(),
    }


def contradictions(bench: Bench, context: Context, guidance: float) -> Figures:
    captions, pool = context.captions, context.labels
    other = {a: pool[b] for a, b in OTHER_PET.items() if b in pool}
    cases = {
        "outline, other breed": (context.outlines, pool),
        "outline, other species": (context.outlines, other),
        "box, other flower": (narrowed(context.boxes, "flower"), pool),
        "box, other garment": (narrowed(context.boxes, "clothing"), pool),
    }
    figures = {}
    for salt, (name, (masked, choices)) in enumerate(cases.items()):
        wanted = contradicted(masked, choices, salt)
        figures[name] = contradiction_figures(bench, masked, wanted, captions, guidance, 20 + salt)
    return figures


def contradicted(masked: MaskedPhotos, pool: dict[str, list[str]], seed: int) -> list[str]:
    """Another label for each photograph, drawn from the pool of its species."""
    draw = random.Random(seed)
    rows = zip(masked.photos.labels, masked.photos.species, strict=True)
    return [draw.choice([name for name in pool[species] if name != label]) for label, species in rows]


def contradiction_figures(
    bench: Bench, masked: MaskedPhotos, wanted: list[str], captions: dict[str, str], guidance: float, salt: int
) -> Figures:
    assert masked.probe is not None
    edited = bench.edit(masked.pictures, masked.masks, [captions[name] for name in wanted], guidance, salt)
    predicted = masked.probe.predict(bench.embed_crops(edited, masked.masks))
    return {
        "follows the prompt": share([p == w for p, w in zip(predicted, wanted, strict=True)]),
        "keeps the original": share([p == o for p, o in zip(predicted, masked.photos.labels, strict=True)]),
        "pictures": len(wanted),
    }


def memory_figures(context: Context, features: Tensor, prompts: list[str]) -> Figures:
    real, _ = nearest(context.val_features, context.train_features)
    generated, _ = nearest(features, context.train_features)
    rows = torch.linspace(0, len(prompts) - 1, min(12, len(prompts))).round().long().tolist()
    distance, index = nearest(features[rows], context.train_features)
    return {
        "photographs median": real.median().item(),
        "photographs p5": real.quantile(0.05).item(),
        "generated median": generated.median().item(),
        "generated p5": generated.quantile(0.05).item(),
        "training photographs searched": len(context.train_features),
        "samples": [
            {"prompt": prompts[row], "distance": d, "nearest": context.train.ids[i]}
            for row, d, i in zip(rows, distance.tolist(), index.tolist(), strict=True)
        ],
    }


def nearest(features: Tensor, train: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine distance to the nearest training photograph, and its index."""
    unit_train = torch.nn.functional.normalize(train, dim=1)
    similarity, index = (torch.nn.functional.normalize(features, dim=1) @ unit_train.T).max(1)
    return 1 - similarity, index

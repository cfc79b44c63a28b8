"""Figures and sheets of a trained pipeline folder, on photographs kept out of training.

    python -m training.evaluate --pipeline FOLDER --photos DIR --out OUT [--device cuda]

Writes figures.json, samples.png and edits.png. Photographs are measured, never written: a sheet holds only what the
model made. Probes are fit on real training photographs, so each accuracy stands beside its ceiling on real ones.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor

from instgenie.bench.metrics import Features, Lpips, Probe, border_jump, crop_to_masks, kid, psnr, ssim
from instgenie.bench.photos import Photos, load_photos
from training.masks import bounding_boxes, dilate, strokes
from training.sampling import fill, load_pipeline, reconstruct
from training.sheets import edit_sheet, sample_sheet

KID = "KID-EffLite0"
CROP_SIZE, CROP_PAD = 224, 8
LPIPS_SIZE = 192
CONTENT_EDGE = 20  # pixels that stay visible around what is hidden whole
DILATION = 8
BATCH = {"cuda": 256, "cpu": 16}  # pictures at once: what suits the device's caches
PER_SPECIES = {"cat": 6, "dog": 10, "flower": 5, "clothing": 11}  # prompts of the sample sheet
WORDS = ("captions", "labels", "species", "colours", "ids")
OTHER_PET = {"cat": "dog", "dog": "cat"}

Figures = dict[str, Any]


@dataclass
class Kind:
    """Photographs with masks of one kind, and the probe that reads crops of such masks."""

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
        """The function over batches of the device, back as one tensor."""
        parts = zip(*(tensor.split(self.batch) for tensor in tensors), strict=True)
        with torch.inference_mode():
            results = torch.cat([function(*(part.to(self.device) for part in row)) for row in parts])
        return results.clone()  # a plain tensor: the probe is fit with gradients

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


def outline_kind(photos: Photos) -> Kind:
    pets = subset(photos, where(photos, "cat", "dog"))
    return Kind(pets, unit(pets), dilate(pets.outlines, DILATION))


def box_kind(photos: Photos, generator: Generator) -> Kind:
    return Kind(photos, unit(photos), box_masks(len(photos), generator))


def content_kind(photos: Photos) -> Kind:
    """Boxes that hide all a caption speaks of: around a pet, and most of the picture elsewhere."""
    most = torch.zeros_like(photos.outlines)
    most[:, CONTENT_EDGE:-CONTENT_EDGE, CONTENT_EDGE:-CONTENT_EDGE] = True
    around = bounding_boxes(dilate(photos.outlines, DILATION))
    is_pet = photos.outlines.flatten(1).any(1)
    return Kind(photos, unit(photos), torch.where(is_pet[:, None, None], around, most))


def stroke_kind(photos: Photos, generator: Generator) -> Kind:
    return Kind(photos, unit(photos), strokes(len(photos), 256, 256, (0.03, 0.09), generator))


def fit_crops(bench: Bench, train: Kind, val: Kind) -> float:
    """Fits the probe of a kind on real training crops; its ceiling on real validation crops."""
    val.probe = Probe().fit(bench.embed_crops(train.pictures, train.masks), train.photos.labels)
    return accuracy(val.probe, bench.embed_crops(val.pictures, val.masks), val.photos.labels)


def autoencoder_figures(bench: Bench, pictures: Tensor) -> tuple[Figures, Tensor]:
    rebuilt = bench.batched(lambda x: reconstruct(bench.pipe, x), pictures)
    full = torch.ones(len(pictures), *pictures.shape[-2:], dtype=torch.bool)
    figures = {
        "psnr": bench.batched(psnr, rebuilt, pictures).mean().item(),
        "ssim": bench.batched(ssim, rebuilt, pictures).mean().item(),
        "lpips": bench.distance(rebuilt, pictures, full),
    }
    return figures, rebuilt


def text_figures(bench: Bench, context: "Context", guidance: float) -> tuple[Figures, Tensor, list[str]]:
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


def edit_figures(bench: Bench, kind: Kind, ceiling: float, guidance: float, salt: int) -> Figures:
    photos, originals, masks = kind.photos, kind.pictures, kind.masks
    assert kind.probe is not None
    told = bench.edit(originals, masks, photos.captions, guidance, salt)
    untold = bench.edit(originals, masks, [""] * len(photos), guidance, salt)
    correct = accuracy(kind.probe, bench.embed_crops(told, masks), photos.labels)
    return {
        "probe accuracy": correct,
        "share of ceiling": correct / max(ceiling, 1e-9),
        "probe accuracy without prompt": accuracy(kind.probe, bench.embed_crops(untold, masks), photos.labels),
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


def contradicted(kind: Kind, pool: dict[str, list[str]], seed: int) -> list[str]:
    """For each photograph another label, drawn from the pool of its species."""
    draw = random.Random(seed)
    rows = zip(kind.photos.labels, kind.photos.species, strict=True)
    return [draw.choice([name for name in pool[species] if name != label]) for label, species in rows]


def contradiction_figures(
    bench: Bench, kind: Kind, wanted: list[str], captions: dict[str, str], guidance: float, salt: int
) -> Figures:
    assert kind.probe is not None
    edited = bench.edit(kind.pictures, kind.masks, [captions[name] for name in wanted], guidance, salt)
    predicted = kind.probe.predict(bench.embed_crops(edited, kind.masks))
    return {
        "follows the prompt": share([p == w for p, w in zip(predicted, wanted, strict=True)]),
        "keeps the original": share([p == o for p, o in zip(predicted, kind.photos.labels, strict=True)]),
        "pictures": len(wanted),
    }


def narrowed(kind: Kind, *species: str) -> Kind:
    keep = where(kind.photos, *species)
    return Kind(subset(kind.photos, keep), kind.pictures[keep], kind.masks[keep], kind.probe)


def contradictions(bench: Bench, context: "Context", guidance: float) -> Figures:
    captions, pool = context.captions, context.labels
    other = {a: pool[b] for a, b in OTHER_PET.items() if b in pool}
    cases = {
        "outline, other breed": (context.outlines, pool),
        "outline, other species": (context.outlines, other),
        "box, other flower": (narrowed(context.boxes, "flower"), pool),
        "box, other garment": (narrowed(context.boxes, "clothing"), pool),
    }
    figures = {}
    for salt, (name, (kind, choices)) in enumerate(cases.items()):
        wanted = contradicted(kind, choices, salt)
        figures[name] = contradiction_figures(bench, kind, wanted, captions, guidance, 20 + salt)
    return figures


def nearest(features: Tensor, train: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine distance to the nearest training photograph, and its index."""
    unit_train = torch.nn.functional.normalize(train, dim=1)
    similarity, index = (torch.nn.functional.normalize(features, dim=1) @ unit_train.T).max(1)
    return 1 - similarity, index


def memory_figures(context: "Context", features: Tensor, prompts: list[str]) -> Figures:
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


@dataclass
class Context:
    """What is measured once: real photographs, their features, probes and ceilings."""

    train: Photos
    val: Photos
    train_features: Tensor
    val_features: Tensor
    probe: Probe
    ceiling: float
    outlines: Kind
    boxes: Kind
    content_boxes: Kind
    strokes: Kind
    crop_ceilings: dict[str, float]
    captions: dict[str, str]  # label -> its plainest caption
    labels: dict[str, list[str]]  # species -> its labels


def prepare(bench: Bench, train: Photos, val: Photos) -> Context:
    train_features, val_features = bench.embed(unit(train)), bench.embed(unit(val))
    probe = Probe().fit(train_features, train.labels)
    outlines, boxes, content_boxes = outline_kind(val), box_kind(val, bench.generator(1)), content_kind(val)
    ceilings = {
        "outlines": fit_crops(bench, outline_kind(train), outlines),
        "boxes": fit_crops(bench, box_kind(train, bench.generator(2)), boxes),
        "content boxes": fit_crops(bench, content_kind(train), content_boxes),
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
        strokes=stroke_kind(val, bench.generator(3)),
        crop_ceilings=ceilings,
        captions={label: caption for _, label, caption in rows},
        labels=labels,
    )


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


def model_figures(bench: Bench, context: Context, guidance: float) -> Figures:
    text, features, prompts = text_figures(bench, context, guidance)
    bench.console.log(f"guidance {guidance}: generated")
    kinds = {"outlines": context.outlines, "boxes": context.boxes, "content boxes": context.content_boxes}
    edits = {
        name: edit_figures(bench, kind, context.crop_ceilings[name], guidance, 10 + salt)
        for salt, (name, kind) in enumerate(kinds.items())
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


def sheet_prompts(context: Context, limit: int) -> list[str]:
    prompts = []
    for species, count in PER_SPECIES.items():
        captions = sorted({context.val.captions[i] for i in where(context.val, species)})
        picks = torch.linspace(0, len(captions) - 1, min(count, len(captions))).round().long().tolist()
        prompts += [captions[i] for i in picks]
    return prompts[:limit]


def save_sheets(bench: Bench, context: Context, guidance: float, out: Path, quick: bool) -> None:
    def make(pictures: Tensor, masks: Tensor, prompts: list[str]) -> Tensor:
        return bench.edit(pictures, masks, prompts, guidance, salt=40)

    prompts = sheet_prompts(context, 4 if quick else 32)
    sample_sheet(make, prompts, bench.device).save(out / "samples.png")
    edit_sheet(make, bench.device, 2 if quick else 8).save(out / "edits.png")


def flat(figures: Figures, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, name))
        elif not isinstance(value, list):
            yield " / ".join((*path, name)), f"{value:.4f}" if isinstance(value, float) else str(value)


def show(console: Console, figures: Figures) -> None:
    table = Table("figure", "value", title="built-in model")
    for name, value in flat(figures):
        table.add_row(name, value)
    console.print(table)


def evaluate(bench: Bench, args: argparse.Namespace) -> Figures:
    train = load_photos(args.photos, "train", 64 if args.quick else args.train_count).to(bench.device)
    val = load_photos(args.photos, "val", 8 if args.quick else args.count).to(bench.device)
    bench.console.log(f"{len(train)} training and {len(val)} validation photographs")
    context = prepare(bench, train, val)
    autoencoder, rebuilt = autoencoder_figures(bench, unit(val))
    figures: Figures = {"autoencoder": autoencoder, "photographs": real_figures(bench, context, rebuilt)}
    bench.console.log("photographs and autoencoder measured")
    for guidance in args.guidance:
        figures[f"guidance {guidance:g}"] = model_figures(bench, context, guidance)
    save_sheets(bench, context, args.guidance[0], args.out, args.quick)
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", required=True, help="a diffusers FluxFillPipeline folder")
    parser.add_argument("--photos", required=True, type=Path, help="folder with captions.csv and the shards")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the transformer")
    parser.add_argument("--count", type=int, help="validation photographs (all of them unless told)")
    parser.add_argument("--train-count", type=int, default=6000, help="training photographs for probes and neighbours")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.5], help="the sheets use the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few pictures and two steps: does it run?")
    return parser.parse_args()


def main() -> None:
    args = parse()
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        device=args.device,
        steps=2 if args.quick else args.steps,
        seed=args.seed,
        pipe=load_pipeline(args.pipeline, args.device, getattr(torch, args.dtype)),
        features=Features().to(args.device),
        lpips=Lpips().to(args.device),
    )
    figures = evaluate(bench, args)
    figures["run"] = {"steps": bench.steps, "seed": bench.seed, "seconds": time.monotonic() - start}
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    show(bench.console, figures)


if __name__ == "__main__":
    main()

"""Figures and sheets of a trained pipeline folder, on photographs kept out of training.

    python -m training.evaluate --pipeline FOLDER --photos DIR --out OUT [--device cuda]

Writes figures.json, samples.png and edits.png. Photographs are measured, never written: a sheet holds only what the
model made.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from instgenie.bench.metrics import Features, Lpips
from instgenie.bench.photos import load_photos
from training.figures import Figures, autoencoder_figures, model_figures, real_figures
from training.holdout import Bench, Context, prepare, unit, where
from training.sampling import load_pipeline
from training.sheets import edit_sheet, sample_sheet

PER_SPECIES = {"cat": 6, "dog": 10, "flower": 5, "clothing": 11}  # prompts of the sample sheet


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


def save_sheets(bench: Bench, context: Context, guidance: float, out: Path, quick: bool) -> None:
    def make(pictures: Tensor, masks: Tensor, prompts: list[str]) -> Tensor:
        return bench.edit(pictures, masks, prompts, guidance, salt=40)

    prompts = sheet_prompts(context, 4 if quick else 32)
    sample_sheet(make, prompts, bench.device).save(out / "samples.png")
    edit_sheet(make, bench.device, 2 if quick else 8).save(out / "edits.png")


def sheet_prompts(context: Context, limit: int) -> list[str]:
    prompts = []
    for species, count in PER_SPECIES.items():
        captions = sorted({context.val.captions[i] for i in where(context.val, species)})
        picks = torch.linspace(0, len(captions) - 1, min(count, len(captions))).round().long().tolist()
        prompts += [captions[i] for i in picks]
    return prompts[:limit]


def show(console: Console, figures: Figures) -> None:
    table = Table("figure", "value", title="built-in model")
    for name, value in flat(figures):
        table.add_row(name, value)
    console.print(table)


def flat(figures: Figures, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, name))
        elif not isinstance(value, list):
            yield " / ".join((*path, name)), f"{value:.4f}" if isinstance(value, float) else str(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", required=True, help="a diffusers FluxFillPipeline folder")
    parser.add_argument("--photos", required=True, type=Path, help="folder with captions.csv and the shards")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the transformer")
    parser.add_argument("--count", type=int, help="number of validation photographs (default: all)")
    parser.add_argument(
        "--train-count", type=int, default=6000, help="number of training photographs for probes and nearest neighbours"
    )
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument(
        "--guidance", type=float, nargs="+", default=[3.5], help="guidance scales to measure; the sheets use the first"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few pictures and two steps, to see that it runs")
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

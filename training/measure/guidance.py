"""Compares rules of guidance on a model into which none is distilled yet: what to distil is decided by these figures.

    python -m training.measure.guidance --photos DIR --pipeline FOLDER

Prints one row per rule: pictures from captions, and pets that become another breed inside their outline.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from instgenie.models.loading.folder import BUILTIN_DEFAULTS
from training.guidance import Guidance
from training.measure.bench import Bench, Candidate, Values
from training.measure.edits import contradict, ratio, saturations, text_figures
from training.measure.photographs import Holdout, prepare

RULES = {  # the times at which guidance acts
    "none": Guidance(0.0, 0.0),
    "all": Guidance(1.0, 1.0),
    "all-unprojected": Guidance(1.0, 1.0, is_projected=False),
    "below-.95": Guidance(0.95, 0.95),
    "below-.9": Guidance(0.9, 0.9),
    "below-.9-unprojected": Guidance(0.9, 0.9, is_projected=False),
    "below-.8": Guidance(0.8, 0.8),
    "distilled": Guidance(),
}
COLUMNS = ("KID", "probe accuracy", "saturation", "another breed", "still the original")


def rule_figures(bench: Bench, holdout: Holdout, candidate: Candidate) -> Values:
    masked = holdout.masked["outline"]
    photos = masked.photos
    edited = bench.edit(candidate, photos.pictures, masked.masks, photos.captions, salt=10)
    colours = torch.stack([bench.batched(saturations, x, masked.masks) for x in (edited, photos.pictures)])
    follows, keeps = contradict(bench, candidate, holdout, masked, holdout.labels, 0)
    return {
        **text_figures(bench, holdout, candidate),
        "saturation": ratio(colours),
        "another breed": follows,
        "still the original": keeps,
    }


def main(arguments: Sequence[str] | None = None, bench: Bench | None = None) -> dict[str, Values]:
    """`bench` brings networks of its own to judge with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, type=Path, help="folder with captions.csv and the shards")
    parser.add_argument("--pipeline", required=True, type=Path, help="the model, trained with guidance 1 alone")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="these alone")
    parser.add_argument("--guidance", type=float, default=BUILTIN_DEFAULTS["guidance"])
    parser.add_argument("--steps", type=int, default=BUILTIN_DEFAULTS["steps"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-val", type=int, help="validation photographs (default: all)")
    parser.add_argument("--num-train", type=int, help="training photographs, for the probes (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    bench = bench or Bench.load(args.device, args.steps, args.guidance, args.seed)
    loaded = Candidate.load("", args.pipeline, args.device)
    holdout = prepare(bench, args.photos, args.num_train, args.num_val)
    figures = {}
    table = Table("guidance", *COLUMNS)
    for name in args.rules:
        candidate = Candidate(name, args.pipeline, loaded.pipe, RULES[name])
        figures[name] = rule_figures(bench, holdout, candidate)
        table.add_row(name, *(f"{figures[name][column]:.4f}" for column in COLUMNS))
        bench.console.log(f"{name}: another breed {figures[name]['another breed']:.2f}")
    Console(width=120).print(table)
    return figures


if __name__ == "__main__":
    main()

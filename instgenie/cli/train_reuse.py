"""`instgenie train-reuse`: its arguments."""

import argparse
from pathlib import Path

from rich.console import Console

from instgenie.cli.arguments import positive, ratio, share, size
from instgenie.cli.screen import hide_loading_bars
from instgenie.errors import ConfigError
from instgenie.machine.model_folders import model_folder
from instgenie.telemetry.progress import Progress


def add_train_reuse(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_train_reuse)
    parser.add_argument("model", metavar="MODEL", help="builtin, or the folder of a diffusers pipeline")
    parser.add_argument("--device", default="auto", help="device (default auto)")
    parser.add_argument("--pictures", type=positive, default=8, metavar="N", help="pictures to make (default 8)")
    parser.add_argument("--steps", type=positive, metavar="N", help="denoising steps; default: the model's own")
    parser.add_argument("--size", type=size, metavar="WxH", help="size of the pictures; default: the model's own")
    about_tolerance = "relative error from which a guess is too wrong (default 0.05)"
    parser.add_argument("--tolerance", type=ratio, default=0.05, metavar="SHARE", help=about_tolerance)
    about_max = "consecutive steps that may be guessed (default 4)"
    parser.add_argument("--max", type=positive, default=4, metavar="N", help=about_max)
    about_blocks = "choose before each block of the network, and not once for a step"
    parser.add_argument("--blocks", action="store_true", help=about_blocks)
    about_tile = (
        "with --blocks, side of the tiles that are computed apart, in tokens, or in latents of a UNet (default 1; 0: "
        "a block computes the whole picture, or nothing)"
    )
    parser.add_argument("--tile", type=int, default=1, metavar="N", help=about_tile)
    about_trust = "share of a prediction's movement that guesses expect to go on (default 0.8)"
    parser.add_argument("--trust", type=share, default=0.8, metavar="SHARE", help=about_trust)
    about_out = "file of the predictor; default: reuse.json in the model's folder, where servers look for it"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about_out)


def run_train_reuse(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from instgenie.engine.reuse_predictor import FILE_NAME
    from instgenie.engine.reuse_training import (
        PROMPTS,
        ReuseSetting,
        picture_from,
        train,
    )  # imports torch and diffusers
    from instgenie.models.loading.load import load

    hide_loading_bars()
    console = Console(stderr=True)
    path = options.out or model_folder(options.model) / FILE_NAME
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder: name the predictor's file with --out")
    model = load(options.model, options.device)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(options.pictures)]
    edits = [picture_from(prompt, number, model, options.size) for number, prompt in enumerate(prompts)]
    if options.steps:
        edits = [replace(edit, steps=options.steps) for edit in edits]
    with Progress(console) as progress:
        task = progress.add("pictures", len(edits))
        tile = max(options.tile, 0) if options.blocks else 0
        setting = ReuseSetting(options.tolerance, options.max, options.trust, options.blocks, tile)
        done = train(model, edits, setting, lambda *_: task.advance(1))
    done.predictor.save(path)
    console.print(
        f"{path}: right about {done.accuracy:.1%} of {done.num_samples:,} held-out guesses, of which "
        f"{done.share_wrong:.1%} are too wrong",
        highlight=False,
    )

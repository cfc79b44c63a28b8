"""Arguments that describe a workload, drawn from a seed or read from a file."""

import argparse
import math
from pathlib import Path

from instgenie.bench.pictures import MaskShape
from instgenie.bench.workload import SHAPES, Arrival, WorkloadRecipe, draw_workload, read_workload, save_workload
from instgenie.cli.arguments import number, positive, rate, size

SIZE = (256, 256)
NUM_TEMPLATES = 4


def add_workload(parser: argparse.ArgumentParser) -> None:
    several = "; may be given several times, in equal shares"
    parser.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="number of edits (default 64)")
    about_rate = "mean arrivals per second (default: all at once, or the rate of the file of arrivals)"
    parser.add_argument("--request-rate", type=rate, default=math.inf, metavar="R", help=about_rate)
    about_arrivals = "file of arrival times: seconds, dates, or milliseconds with a number (default: Poisson arrivals)"
    parser.add_argument("--arrivals", metavar="FILE", help=about_arrivals)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the workload (default 0)")
    about_ratios = "mask ratios: production (the default), inpaint, retouch, or a file of numbers"
    parser.add_argument("--mask-ratios", default="production", metavar="FILE", help=about_ratios)
    about_shapes = f"shape of the masks (default all){several}"
    parser.add_argument("--mask-shape", action="append", choices=SHAPES, help=about_shapes)
    about_templates = f"number of different pictures (default {NUM_TEMPLATES})"
    parser.add_argument("--num-templates", type=positive, default=NUM_TEMPLATES, metavar="N", help=about_templates)
    about_skew = (
        "exponent of popularity: the n-th picture gets edits in proportion to 1/n^X (default 1; 0: equal shares)"
    )
    parser.add_argument("--template-skew", type=skew, default=1.0, metavar="X", help=about_skew)
    about_size = f"size of the pictures (default {SIZE[1]}x{SIZE[0]}){several}"
    parser.add_argument("--size", action="append", type=size, metavar="WxH", help=about_size)
    about_steps = f"denoising steps (default: the model's own){several}"
    parser.add_argument("--steps", action="append", type=positive, metavar="N", help=about_steps)
    about_replay = "replay the edits of a file that --save-workload wrote, instead of drawing them"
    parser.add_argument("--workload", type=Path, metavar="FILE", help=about_replay)
    parser.add_argument(
        "--save-workload", type=Path, metavar="FILE", help="write the workload to this file, one edit per line"
    )


def make_workload(options: argparse.Namespace) -> tuple[str, tuple[Arrival, ...]]:
    """Return a title for the workload, and its edits."""
    if options.workload:
        workload, title = read_workload(options.workload), f"{options.workload}"
    else:
        workload = draw_workload(recipe_of(options))
        when = f"as in {options.arrivals}" if options.arrivals else f"{options.request_rate:g}/s"
        title = f"{options.num_prompts} edits, {when}, masks {options.mask_ratios}"
    if options.save_workload:
        save_workload(workload, options.save_workload)
    return title, tuple(workload)


def recipe_of(options: argparse.Namespace) -> WorkloadRecipe:
    shapes: tuple[MaskShape, ...] = tuple(options.mask_shape or SHAPES)
    return WorkloadRecipe(
        num_edits=options.num_prompts,
        rate=options.request_rate,
        arrivals=options.arrivals,
        mask_ratios=options.mask_ratios,
        mask_shapes=shapes,
        num_templates=options.num_templates,
        skew=options.template_skew,
        sizes=tuple(options.size or [SIZE]),
        steps=tuple(options.steps or [None]),
        seed=options.seed,
    )


def skew(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf or (not value and text.strip("0.")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value

"""`instgenie bench` and `instgenie calibrate`: their arguments."""

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from instgenie.cli.arguments import (
    add_convolutions,
    add_model,
    add_quantization,
    add_text_padding,
    positive,
    rate,
    ratio,
    size,
)
from instgenie.cli.claims import add_bench_table
from instgenie.cli.evaluate import (
    add_bench_deadlines,
    add_bench_engine,
    add_bench_mixed,
    add_bench_predictors,
    add_bench_reproduce,
    add_bench_simulate,
)
from instgenie.cli.load import add_bench_remote, add_bench_serve
from instgenie.cli.loading import add_bench_load
from instgenie.cli.screen import hide_loading_bars
from instgenie.types import CacheDtype, PlanPolicy, Quantization


def add_bench(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    for name, (add, short, about) in BENCHES.items():
        bench = benches.add_parser(name, help=short, description=about)
        bench.set_defaults(parser=bench)
        add(bench)


def add_bench_edit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_edit)

    def add(name: str, kind: Callable[[str], object], metavar: str, about: str) -> None:
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)

    def add_several(name: str, field: str, about: str, **options: Any) -> None:
        about = f"{about}; may be given several times"
        parser.add_argument(name, dest=field, action="append", default=argparse.SUPPRESS, help=about, **options)

    add("--steps", positive, "N", "number of denoising steps (default 28)")
    add("--repeats", positive, "N", "runs per system (default 5)")
    about_ratio = "masked share of the tokens (default 1 and 0.2)"
    add_several("--mask-ratio", "mask_ratios", about_ratio, type=ratio, metavar="R")
    add_several("--batch", "batches", "edits per batch (default 1)", type=positive, metavar="N")
    add_several(
        "--kind", "kinds", "activations to keep: K and V, or the inputs of blocks (default kv)", choices=["kv", "y"]
    )
    about_dtype = "number format of the activations (default model: the model's own)"
    add_several("--cache-dtype", "cache_dtypes", about_dtype, choices=get_args(CacheDtype))
    about_stride = "keep the activations of every N-th step (default 1)"
    parser.add_argument("--cache-stride", type=positive, default=1, metavar="N", help=about_stride)
    add_text_padding(parser)
    about_tier = "place of the activations: next to the model (gpu, the default) or in main memory (host)"
    add_several("--tier", "tiers", about_tier, choices=["gpu", "host"])
    about_policy = "planning policy for activations in main memory (default cached: all blocks); naive overlaps no load"
    add_several("--policy", "policies", about_policy, choices=get_args(PlanPolicy))
    about_rows = "rows copied from main memory: all, only the needed ones, or whichever is faster (auto, the default)"
    parser.add_argument("--rows", choices=["auto", "whole", "needed"], default="auto", help=about_rows)
    about_quality = "quality of the system own, an edit of a picture never seen before (default balanced)"
    parser.add_argument("--quality", choices=("fast", "balanced", "adaptive"), default="balanced", help=about_quality)
    systems = ["diffusers", "compiled", "reference", "dense", "own", "cached"]
    add_several("--system", "systems", "system to measure (default diffusers and ours)", choices=systems)
    add_quantization(parser)
    add_convolutions(parser)
    parser.add_argument("--no-kernels", action="store_true", help="use plain torch instead of fused kernels")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernels one by one instead of as CUDA graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


def run_bench_edit(options: argparse.Namespace) -> None:
    from instgenie.bench.edit import EditStudy, bench_edit  # imports torch and diffusers
    from instgenie.kernels.switch import kernels

    hide_loading_bars()
    given = {field.name: getattr(options, field.name) for field in fields(EditStudy) if hasattr(options, field.name)}
    asked: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    study = EditStudy(**asked, graphs=not options.no_graphs)
    with kernels(enabled=not options.no_kernels):
        bench_edit(options.model, options.device, options.size, study, options.json, options.command_line)


def add_bench_profile(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_profile)
    about_ratio = "masked share of the tokens (default 0.11)"
    parser.add_argument("--mask-ratio", type=ratio, default=0.11, metavar="R", help=about_ratio)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="edits per batch (default 1)")
    about_dtype = "number format of the activations (default model: the model's own)"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), default="model", help=about_dtype)
    parser.add_argument("--dense", action="store_true", help="compute every token, without activations")
    add_text_padding(parser)
    add_quantization(parser)
    add_convolutions(parser)
    parser.add_argument("--no-kernels", action="store_true", help="use plain torch instead of fused kernels")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernels one by one instead of as CUDA graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


def run_bench_profile(options: argparse.Namespace) -> None:
    from instgenie.bench.profile import ProfileStudy, bench_profile  # imports torch and diffusers
    from instgenie.kernels.switch import kernels

    hide_loading_bars()
    given = {field.name: getattr(options, field.name) for field in fields(ProfileStudy) if hasattr(options, field.name)}
    study = ProfileStudy(**given, graphs=not options.no_graphs)
    with kernels(enabled=not options.no_kernels):
        bench_profile(options.model, options.device, options.size, study, options.json)


def add_bench_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_pipeline)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write the timeline as an HTML page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome (JSON)")
    about_ratio = "masked share of the tokens (default 0.11)"
    parser.add_argument("--mask-ratio", type=ratio, default=0.11, metavar="R", help=about_ratio)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="edits per batch (default 1)")
    about_kind = "activations to keep: K and V, or the inputs of blocks (default kv)"
    parser.add_argument("--kind", choices=["kv", "y"], default="kv", help=about_kind)
    about_dtype = "number format of the activations; default: model on a GPU, fp8 on a CPU, which loads nothing else"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), help=about_dtype)
    about_rows = "rows to copy: all, only the needed ones, or whichever is faster (auto, the default)"
    parser.add_argument("--rows", choices=["auto", "whole", "needed"], default="auto", help=about_rows)
    about_policy = "planning policy; may be given several times (default naive, cached, greedy, exact)"
    parser.add_argument("--policy", action="append", choices=get_args(PlanPolicy), help=about_policy)
    add_model(parser)


def run_bench_pipeline(options: argparse.Namespace) -> None:
    from instgenie.bench.pipeline import PipelineStudy, bench_pipeline  # imports torch and diffusers

    hide_loading_bars()
    study = PipelineStudy(options.mask_ratio, options.batch, options.kind, options.cache_dtype, options.rows)
    if options.policy:
        study = replace(study, policies=tuple(options.policy))
    bench_pipeline(options.model, options.device, options.size, study, options.timeline, options.trace)


def add_bench_controls(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_controls)
    parser.add_argument("--model", help="folder of a UNet's pipeline; default: a small one with random weights")
    about_net = "folder of a ControlNet; may be given twice (default: two with random weights)"
    parser.add_argument("--controlnet", action="append", type=Path, default=[], metavar="PATH", help=about_net)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--size", type=size, default=(256, 256), metavar="WxH", help="working size (default 256x256)")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write the timeline as an HTML page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome (JSON)")


def run_bench_controls(options: argparse.Namespace) -> None:
    from instgenie.bench.controls import bench_controls  # imports torch and diffusers

    hide_loading_bars()
    where = options.model, options.device, options.size
    bench_controls(*where, options.controlnet[:2], options.timeline, options.trace)


def add_bench_quality(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_quality)
    about_photos = "folder with captions.csv and tar shards of photographs, of which the held-out ones are edited"
    parser.add_argument("--photos", type=Path, required=True, metavar="DIR", help=about_photos)
    about_masked = "folder of photographs NAME.png and masks NAME_mask.png (white: remove it), edited beside"
    parser.add_argument("--masked", type=Path, metavar="DIR", help=about_masked)
    parser.add_argument("--num", type=positive, default=15, metavar="N", help="photographs to edit (default 15)")
    about_steps = "number of denoising steps; default: the model's own"
    parser.add_argument("--steps", type=positive, metavar="N", help=about_steps)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of masks, prompts and edits (default 0)")
    about_networks = "leave out LPIPS, KID and the probe, which take most of the time on a CPU"
    parser.add_argument("--no-networks", action="store_true", help=about_networks)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every picture's figures to this file")
    about_schedules = (
        "compare the schedules of dense steps of edits without a template; with --only-kept, both in one table"
    )
    parser.add_argument("--schedules", action="store_true", help=about_schedules)
    about_out = "also write quality.md, plots and a sheet of pictures to this folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about_out)
    about_kept = "study only what is kept of a template: how many steps, in how many bits, the padding of prompts"
    parser.add_argument("--only-kept", action="store_true", help=about_kept)
    about_quantization = (
        "compare edits whose products are of low precision with edits whose products are not; devices that cannot "
        "multiply so compute the same numbers, slowly"
    )
    parser.add_argument("--quantization", choices=get_args(Quantization), help=about_quantization)
    add_model(parser, has_size=False)


def run_bench_quality(options: argparse.Namespace) -> None:
    from instgenie.bench.quality import bench_quality  # imports torch and diffusers

    hide_loading_bars()
    what = options.photos, options.num, options.model, options.device, options.steps, options.seed
    only = options.schedules, options.only_kept
    about = options.json, options.out, *only, options.quantization, options.masked
    bench_quality(*what, not options.no_networks, *about)


def add_bench_router(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_router)
    parser.add_argument(
        "--repeats",
        type=positive,
        default=2000,
        metavar="N",
        help="decisions per policy and number of workers (default 2000)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run_bench_router(options: argparse.Namespace) -> None:
    from instgenie.bench.router import bench_router

    bench_router(options.repeats, options.json)


def add_bench_scale(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_scale)
    parser.add_argument(
        "part", nargs="*", choices=["size", "fronts", "age", "links", []], metavar="PART",
        help="part of the study: size, fronts, age, links (default all)",
    )  # fmt: skip
    about_workers = "size of a cluster; may be given several times (default 1, 8, 64, 512, 4096 and 20000)"
    parser.add_argument("--workers", type=positive, action="append", metavar="N", help=about_workers)
    parser.add_argument("--load", type=ratio, default=0.6, metavar="R", help="share of the workers' capacity (0.6)")
    about_edits = "simulated edits per worker (default 20), at least 400 and at most 80,000 in all"
    parser.add_argument("--edits", type=positive, default=20, metavar="N", help=about_edits)
    about_templates = "different pictures per worker (default 2)"
    parser.add_argument("--templates", type=rate, default=2.0, metavar="X", help=about_templates)
    about_dtype = "number format of the activations (default fp8)"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), default="fp8", help=about_dtype)
    about_stride = "keep the activations of every N-th step (default 1)"
    parser.add_argument("--cache-stride", type=positive, default=1, metavar="N", help=about_stride)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the latencies by size (SVG)")


def run_bench_scale(options: argparse.Namespace) -> None:
    from instgenie.bench.scale import ScaleStudy, bench_scale  # imports torch and diffusers

    hide_loading_bars()
    study = ScaleStudy(
        load=options.load,
        edits_per_worker=options.edits,
        templates_per_worker=options.templates,
        cache_dtype=options.cache_dtype,
        cache_stride=options.cache_stride,
    )
    if options.workers:
        study = replace(study, workers=tuple(options.workers))
    bench_scale(study, options.part, options.json, options.plot)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_calibrate)
    about_out = "file of the latency model, with a plot beside it; default: in the user's cache folder"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about_out)
    add_quantization(parser)
    add_convolutions(parser)
    add_model(parser)


def run_calibrate(options: argparse.Namespace) -> None:
    from instgenie.bench.calibrate import calibrate_device  # imports torch and diffusers

    hide_loading_bars()
    how = options.quantization, options.convolutions
    calibrate_device(options.model, options.device, options.size, options.out, *how)


def add_bench_detail(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_detail)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="photographs of 2 megapixels or more")
    about_ratio = "masked share of the pixels (default 0.01 and 0.04); may be given several times"
    parser.add_argument("--mask-ratio", type=ratio, action="append", metavar="R", help=about_ratio)
    parser.add_argument("--prompt", default="a photo of a daisy", metavar="TEXT", help="what the masks become")
    parser.add_argument("--steps", type=positive, metavar="N", help="denoising steps; default: the model's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    about_keep = "folder for pictures of each edit: the photograph, whole, crop without grain, crop"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=about_keep)
    add_model(parser, has_size=False)


def run_bench_detail(options: argparse.Namespace) -> None:
    from instgenie.bench.detail import bench_detail
    from instgenie.models.loading.load import load

    hide_loading_bars()
    model = load(options.model, options.device)
    ratios, steps = options.mask_ratio or [0.01, 0.04], options.steps or model.steps
    bench_detail(options.folder, model, ratios, options.prompt, steps, options.json, options.keep)


BENCHES: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "edit": (
        add_bench_edit,
        "edits, beside diffusers",
        "Time edits through diffusers' own pipeline and through our engine, dense and cached, in turn.",
    ),
    "profile": (
        add_bench_profile,
        "the kernels of one step",
        "Show where the time of one step goes, kernel by kernel.",
    ),
    "pipeline": (
        add_bench_pipeline,
        "computing and loading in one step",
        "Show what one step computes and loads, and when, under every planning policy. Activations are in main memory.",
    ),
    "load": (
        add_bench_load,
        "loading a model, beside diffusers",
        "Time how long a folder of weights takes to a device, in processes of their own: ours, diffusers, and floors.",
    ),
    "controls": (
        add_bench_controls,
        "ControlNets beside a step",
        "Show when one step and its ControlNets compute, in one process and in several.",
    ),
    "quality": (
        add_bench_quality,
        "fidelity against cost",
        "Edit held-out photographs with every method and the same seeds, and compare them with the dense edits.",
    ),
    "serve": (
        add_bench_serve,
        "a server under load",
        "Send edits to a running server, or to servers that are compared, and measure latencies and edits in time.",
    ),
    "engine": (
        add_bench_engine,
        "throughput by batch size",
        "Time batches of edits with different masks through our engine and through other systems.",
    ),
    "mixed": (
        add_bench_mixed,
        "batches of several sizes",
        "Time batches of edits of several sizes in passes per size, and in one pass over tiles.",
    ),
    "reproduce": (
        add_bench_reproduce,
        "the paper's figures, measured again",
        "Measure what the tables and figures of the InstGenIE paper show, and write a report.",
    ),
    "simulate": (
        add_bench_simulate,
        "a simulated cluster",
        "Simulate a cluster of any size under a workload, with the real router and planner.",
    ),
    "remote": (
        add_bench_remote,
        "a worker on another machine",
        "Time the messages of a worker over encrypted TCP, as between machines, beside a local socket.",
    ),
    "scale": (
        add_bench_scale,
        "clusters of 1 to 20,000 workers",
        "Simulate clusters with several fronts, views of bounded age, and network links, and show what is full first.",
    ),
    "deadlines": (
        add_bench_deadlines,
        "edits in time, by policy",
        "Simulate clusters with every scheduling policy, and print how many edits meet their deadlines.",
    ),
    "predictors": (
        add_bench_predictors,
        "predicted step times",
        "Measure random mixes of jobs, and compare the planner's predictions with support vector regression.",
    ),
    "router": (
        add_bench_router,
        "the time to choose a worker",
        "Time the router's decision with every policy, among 1 to 20,000 workers, alone and within a front.",
    ),
    "detail": (
        add_bench_detail,
        "sharpness of edits of large photographs",
        "Compare the detail of edits with the photograph around them, with crop off and auto, in a folder.",
    ),
    "table": (
        add_bench_table,
        "the table of claims",
        "Print the table of claims about performance, or write it into a Markdown page.",
    ),
}

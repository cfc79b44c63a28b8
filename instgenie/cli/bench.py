"""`instgenie bench` and `instgenie calibrate`: what is measured, and with what."""

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from instgenie.cli.arguments import add_model, positive, rate, ratio
from instgenie.cli.claims import add_bench_table
from instgenie.cli.evaluate import add_bench_engine, add_bench_reproduce, add_bench_simulate
from instgenie.cli.screen import hide_loading_bars
from instgenie.cli.workload import add_workload, make_workload
from instgenie.types import CacheDtype, PlanPolicy


def add_bench(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="WHAT")
    about_bench = "Time edits through diffusers' own pipeline and through our engine, dense and cached, side by side."
    add_bench_edit(benches.add_parser("edit", help="edits, beside diffusers", description=about_bench))
    about_pipeline = "Show what a step computes and loads when, with every policy: activations are in main memory."
    add_bench_pipeline(benches.add_parser("pipeline", help="loads beside a step", description=about_pipeline))
    about_quality = "Edit held-out photographs with every method, same seeds, and compare with the dense edits."
    add_bench_quality(benches.add_parser("quality", help="fidelity against cost", description=about_quality))
    about_load = "Send edits to a running server, or to three kinds of servers in turn, and time the answers."
    add_bench_serve(benches.add_parser("serve", help="a load on a server", description=about_load))
    about_engine = "Time batches of edits with different masks through our engine and through other systems."
    add_bench_engine(benches.add_parser("engine", help="throughput by batch size", description=about_engine))
    about_reproduce = "Measure what the tables and figures of the InstGenIE paper show, and write a report."
    add_bench_reproduce(benches.add_parser("reproduce", help="the paper, run again", description=about_reproduce))
    about_simulate = "Simulate a cluster of any size under a workload, with the real router and planner."
    add_bench_simulate(benches.add_parser("simulate", help="a simulated cluster", description=about_simulate))
    about_router = "Time the router's decision, with every policy, among 8 to 20,000 busy workers."
    add_bench_router(benches.add_parser("router", help="the choice of a worker", description=about_router))
    about_table = "Print the table of claims about performance, or write it into a Markdown page."
    add_bench_table(benches.add_parser("table", help="the table of claims", description=about_table))


def add_bench_edit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_edit)

    def add(name: str, kind: Callable[[str], object], metavar: str, about: str) -> None:
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)

    def add_several(name: str, field: str, about: str, **options: Any) -> None:
        about = f"{about}; may be given several times"
        parser.add_argument(name, dest=field, action="append", default=argparse.SUPPRESS, help=about, **options)

    add("--steps", positive, "N", "number of denoising steps (default 28)")
    add("--repeats", positive, "N", "runs of each system (default 5)")
    about_ratio = "share of the tokens that is masked (default 1 and 0.2)"
    add_several("--mask-ratio", "mask_ratios", about_ratio, type=ratio, metavar="R")
    add_several("--batch", "batches", "edits at once (default 1)", type=positive, metavar="N")
    add_several("--kind", "kinds", "what the cached system keeps (default kv)", choices=["kv", "y"])
    about_dtype = "what activations are kept in (default model: what the model computes in)"
    add_several("--cache-dtype", "cache_dtypes", about_dtype, choices=get_args(CacheDtype))
    about_tier = "where they are: next to the model (gpu, the default) or in main memory"
    add_several("--tier", "tiers", about_tier, choices=["gpu", "host"])
    about_policy = "which blocks are cached, where anything is loaded (default cached: all); naive hides no load"
    add_several("--policy", "policies", about_policy, choices=get_args(PlanPolicy))
    about_rows = "rows that are copied from main memory: whole places, those that are needed, or what is faster (auto)"
    parser.add_argument("--rows", choices=["auto", "whole", "needed"], default="auto", help=about_rows)
    systems = ["diffusers", "compiled", "dense", "cached"]
    add_several("--system", "systems", "what is measured (default all but compiled)", choices=systems)
    parser.add_argument("--no-kernels", action="store_true", help="plain torch instead of fused kernels")
    parser.add_argument("--no-graphs", action="store_true", help="launch by launch instead of CUDA graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


def run_bench_edit(options: argparse.Namespace) -> None:
    from instgenie.bench.edit import EditStudy, bench_edit  # brings torch and diffusers
    from instgenie.kernels.switch import kernels

    hide_loading_bars()
    given = {field.name: getattr(options, field.name) for field in fields(EditStudy) if hasattr(options, field.name)}
    asked: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    study = EditStudy(**asked, graphs=not options.no_graphs)
    with kernels(enabled=not options.no_kernels):
        bench_edit(options.model, options.device, options.size, study, options.json, options.command_line)


def add_bench_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_pipeline)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a page to look at (HTML)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome (JSON)")
    about_ratio = "share of the tokens that is masked (default 0.11)"
    parser.add_argument("--mask-ratio", type=ratio, default=0.11, metavar="R", help=about_ratio)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="edits at once (default 1)")
    parser.add_argument("--kind", choices=["kv", "y"], default="kv", help="what is kept (default kv)")
    about_dtype = "what it is kept in; default: model on a GPU, fp8 on a CPU, which loads nothing else"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), help=about_dtype)
    about_rows = "rows that are copied: whole places, those that are needed, or what is faster (auto)"
    parser.add_argument("--rows", choices=["auto", "whole", "needed"], default="auto", help=about_rows)
    about_policy = "which policies; may be given several times (default naive, cached, greedy, exact)"
    parser.add_argument("--policy", action="append", choices=get_args(PlanPolicy), help=about_policy)
    add_model(parser)


def run_bench_pipeline(options: argparse.Namespace) -> None:
    from instgenie.bench.pipeline import PipelineStudy, bench_pipeline  # brings torch and diffusers

    hide_loading_bars()
    study = PipelineStudy(options.mask_ratio, options.batch, options.kind, options.cache_dtype, options.rows)
    if options.policy:
        study = replace(study, policies=tuple(options.policy))
    bench_pipeline(options.model, options.device, options.size, study, options.timeline, options.trace)


def add_bench_quality(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_quality)
    about_photos = "folder with captions.csv and tar shards of photographs; the held-out ones are edited"
    parser.add_argument("--photos", type=Path, required=True, metavar="DIR", help=about_photos)
    parser.add_argument("--num", type=positive, default=15, metavar="N", help="photographs to edit (default 15)")
    about_steps = "number of denoising steps; default: what suits the model"
    parser.add_argument("--steps", type=positive, metavar="N", help=about_steps)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of masks, prompts and edits (default 0)")
    about_networks = "leave out LPIPS, KID and probe, which take most of the time on a CPU"
    parser.add_argument("--no-networks", action="store_true", help=about_networks)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every picture's figures to this file")
    about_out = "also write tables into quality.md, plots and a sheet of pictures to this folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about_out)
    add_model(parser, has_size=False)


def run_bench_quality(options: argparse.Namespace) -> None:
    from instgenie.bench.quality import bench_quality  # brings torch and diffusers

    hide_loading_bars()
    what = options.photos, options.num, options.model, options.device, options.steps, options.seed
    bench_quality(*what, not options.no_networks, options.json, options.out)


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_serve, parser=parser)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    parser.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    about_compare = "start three servers in turn: ours, static and naive batches of every token"
    parser.add_argument("--compare", action="store_true", help=about_compare)
    about_concurrency = "edits that may be on their way at once (default 256)"
    parser.add_argument("--max-concurrency", type=positive, default=256, metavar="N", help=about_concurrency)
    about_slo = "an edit is in time within so many times what it takes alone (default 2)"
    parser.add_argument("--slo-scale", type=rate, default=2.0, metavar="X", help=about_slo)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_workload(parser)
    add_model(parser, has_size=False)


def run_bench_serve(options: argparse.Namespace) -> None:
    from instgenie.bench.serve import Plan, bench_serve, compare

    title, workload = make_workload(options)
    plan = Plan(title, workload, options.max_concurrency, options.slo_scale)
    if options.compare:
        compare(plan, options.model, options.device, options.json)
    else:
        bench_serve(plan, options.base_url, options.api_key, options.json)


def add_bench_router(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_router)
    parser.add_argument("--repeats", type=positive, default=2000, metavar="N", help="decisions (default 2000)")


def run_bench_router(options: argparse.Namespace) -> None:
    from instgenie.bench.router import bench_router

    bench_router(options.repeats)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_calibrate)
    about_out = "where the figures go, a plot beside them; default: the user's cache folder, by device and model"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about_out)
    add_model(parser)


def run_calibrate(options: argparse.Namespace) -> None:
    from instgenie.bench.calibrate import calibrate_device  # brings torch and diffusers

    hide_loading_bars()
    calibrate_device(options.model, options.device, options.size, options.out)

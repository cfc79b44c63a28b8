"""`instgenie bench engine`, `mixed`, `reproduce`, `simulate`, `deadlines` and `predictors`: their arguments."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from instgenie.cli.arguments import add_convolutions, add_model, add_text_padding, gib, positive, rate, ratio, size
from instgenie.cli.screen import hide_loading_bars
from instgenie.cli.workload import add_workload, make_workload
from instgenie.cost.planner import POLICIES
from instgenie.scheduling.names import Batching, RoutingPolicy, Scheduling
from instgenie.simulate.cluster import ClusterShape
from instgenie.simulate.service import SideSeconds
from instgenie.types import CacheDtype

SYSTEM_NAMES = (
    "diffusers",
    "diffusers compiled",
    "step skipping",
    "first-block cache",
    "crop and stitch",
    "FISEdit-style",
    "dense",
    "cached",
)
PART_NAMES = ("fig4", "fig6", "fig11", "fig12", "fig14", "fig15", "fig16", "table2", "overheads", "simulator")
SWIFT_NAMES = ("optimisations", "adapters", "switching")
PATCHED_NAMES = ("patches",)


def add_bench_engine(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_engine)
    several = "; may be given several times"
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="denoising steps (default 8)")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs per system (default 3)")
    about_batch = f"jobs per batch (default 1, 2, 4 and 8){several}"
    parser.add_argument("--batch", action="append", type=positive, metavar="N", help=about_batch)
    about_system = f"{', '.join(SYSTEM_NAMES)} (default: all but compiled and cropped){several}"
    parser.add_argument("--system", action="append", choices=SYSTEM_NAMES, metavar="NAME", help=about_system)
    about_ratios = "mask ratios: production (the default), inpaint, retouch, or a file of numbers"
    parser.add_argument("--mask-ratios", default="production", metavar="FILE", help=about_ratios)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the masks (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_convolutions(parser)
    add_model(parser)


def run_bench_engine(options: argparse.Namespace) -> None:
    from instgenie.bench.engine import EngineStudy, bench_engine  # imports torch and diffusers

    hide_loading_bars()
    default = EngineStudy()
    study = EngineStudy(
        steps=options.steps,
        repeats=options.repeats,
        batches=tuple(options.batch or default.batches),
        mask_ratios=options.mask_ratios,
        systems=tuple(options.system or default.systems),
        seed=options.seed,
        convolutions=options.convolutions,
    )
    bench_engine(options.model, options.device, options.size, study, options.json)


def add_bench_mixed(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_mixed)
    several = "; may be given several times"
    about_size = f"size of a part of the edits (default 512x512, 768x768 and 1024x1024){several}"
    parser.add_argument("--size", action="append", dest="sizes", type=size, metavar="WxH", help=about_size)
    about_batch = f"edits per batch (default 3, 6 and 12){several}"
    parser.add_argument("--batch", action="append", dest="batches", type=positive, metavar="N", help=about_batch)
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="denoising steps (default 8)")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs per system (default 3)")
    about_ratio = "masked share of the tokens (default 0.2)"
    parser.add_argument("--mask-ratio", type=ratio, default=0.2, metavar="R", help=about_ratio)
    about_dtype = "number format of the activations (default model: the model's own)"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), default="model", help=about_dtype)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser, has_size=False)


def run_bench_mixed(options: argparse.Namespace) -> None:
    from instgenie.bench.mixed import MixedStudy, bench_mixed  # imports torch and diffusers

    hide_loading_bars()
    default = MixedStudy()
    study = MixedStudy(
        sizes=tuple(options.sizes or default.sizes),
        batches=tuple(options.batches or default.batches),
        steps=options.steps,
        repeats=options.repeats,
        mask_ratio=options.mask_ratio,
        cache_dtype=options.cache_dtype,
    )
    bench_mixed(options.model, options.device, study, options.json, options.command_line)


def add_bench_reproduce(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_reproduce)
    about_parts = (
        f"all, or some of {', '.join(PART_NAMES)}; swift, or some of {', '.join(SWIFT_NAMES)}, for the figures of "
        f"SwiftDiffusion; patched, or {', '.join(PATCHED_NAMES)}, for those of PatchedServe; shared measurements are "
        "made once"
    )
    parser.add_argument("parts", nargs="+", metavar="NAME", help=about_parts)
    about_out = "folder of the report: index.html, or NAME.html for a single part"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about_out)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the tables to this file")
    about_trace = "CSV of requests with a column lora_args, whose LoRAs the parts of swift measure, too"
    parser.add_argument("--adapter-trace", type=Path, metavar="FILE", help=about_trace)
    add_model(parser, has_size=False)


def run_bench_reproduce(options: argparse.Namespace) -> None:
    from instgenie.bench.reproduce.run import reproduce  # imports torch and diffusers

    hide_loading_bars()
    reproduce(options.parts, options.model, options.device, options.out, options.json, options.adapter_trace)


def add_bench_simulate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_simulate)
    parser.add_argument("--workers", type=positive, default=8, metavar="N", help="workers of the cluster (default 8)")
    parser.add_argument(
        "--max-batch-size", type=positive, default=8, metavar="N", help="most jobs in a step (default 8)"
    )
    about_policy = "routing policy; may be given several times (default: all in turn)"
    parser.add_argument("--policy", action="append", choices=get_args(RoutingPolicy), help=about_policy)
    parser.add_argument(
        "--batching", choices=get_args(Batching), default="continuous", help="way of batching (default continuous)"
    )
    about_scheduling = "who goes first; may be given several times (default fcfs)"
    parser.add_argument("--scheduling", action="append", choices=get_args(Scheduling), help=about_scheduling)
    about_slo = "deadline of an edit, as a multiple of what it takes alone (default: none)"
    parser.add_argument("--slo-scale", type=rate, metavar="FACTOR", help=about_slo)
    about_between = "seconds from the end of a step to the begin of the next (default 0)"
    parser.add_argument("--between", type=rate, default=0.0, metavar="S", help=about_between)
    about_against = (
        "simulate the runs of a file that bench serve --scheduling wrote, and print the errors; no more options"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help=about_against)
    parser.add_argument("--no-reuse", action="store_true", help="no edit finds a template")
    about_own = "edits without a template read what the dense steps of this quality leave behind (default: none do)"
    parser.add_argument("--own", choices=("fast", "balanced"), help=about_own)
    add_latency(parser)
    about_plan = (
        "planning policy: exact (the default), greedy (Algorithm 1), cached (all blocks), naive (no overlap) or dense"
    )
    parser.add_argument("--plan", choices=tuple(POLICIES), default="exact", help=about_plan)
    parser.add_argument(
        "--in-gpu", action="store_true", help="keep activations in GPU memory, where they need no loading"
    )
    about_templates = "templates that fit into the memory of a worker (default: all)"
    parser.add_argument("--templates-in-memory", type=positive, metavar="N", help=about_templates)
    about_gib = "memory of a worker for templates, instead of their number; they are fetched from a disk of 1 GB/s"
    parser.add_argument("--cache-gib", type=gib, metavar="GIB", help=about_gib)
    about_dtype = "number format of the activations (default model)"
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), default="model", help=about_dtype)
    about_stride = "keep the activations of every N-th step (default 1)"
    parser.add_argument("--cache-stride", type=positive, default=1, metavar="N", help=about_stride)
    add_text_padding(parser)
    about_fetch = "seconds to fetch a template that is not in memory (default 1)"
    parser.add_argument("--fetch", type=rate, default=1.0, metavar="S", help=about_fetch)
    parser.add_argument(
        "--prepare", type=rate, default=0.05, metavar="S", help="seconds to prepare an edit (default 0.05)"
    )
    parser.add_argument(
        "--finish", type=rate, default=0.05, metavar="S", help="seconds to decode an edit (default 0.05)"
    )
    about_token = "additional seconds to decode each masked token (default 0)"
    parser.add_argument("--finish-token", type=rate, default=0.0, metavar="S", help=about_token)
    about_thread = "seconds to encode an edit in a thread, while the next one is decoded (default 0)"
    parser.add_argument("--finish-thread", type=rate, default=0.0, metavar="S", help=about_thread)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--model", default="dummy:flux.1-dev", help="model whose steps are simulated (default dummy:flux.1-dev)"
    )
    add_workload(parser)


def add_latency(parser: argparse.ArgumentParser) -> None:
    about_latency = "latency model that instgenie calibrate wrote; default: typical figures for the kind of device"
    parser.add_argument("--latency", type=Path, metavar="FILE", help=about_latency)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cuda", help="kind of device (default cuda)")


def run_bench_simulate(options: argparse.Namespace) -> None:
    from instgenie.bench.replay import bench_replay  # imports torch and diffusers
    from instgenie.bench.simulate import Setup, bench_simulate

    hide_loading_bars()
    if options.against:
        bench_replay(options.against)
        return
    title, workload = make_workload(options)
    shape = ClusterShape(
        num_workers=options.workers,
        max_batch_size=options.max_batch_size,
        batching=options.batching,
        reuse=not options.no_reuse,
        own=options.own,
        max_templates=options.templates_in_memory,
        fetch=options.fetch,
    )
    setup = Setup(
        model=options.model,
        kind=options.kind,
        latency=options.latency,
        plan=options.plan,
        in_gpu=options.in_gpu,
        side=SideSeconds(
            prepare=options.prepare,
            decode=options.finish,
            decode_token=options.finish_token,
            finish_thread=options.finish_thread,
            between=options.between,
        ),
        cache_dtype=options.cache_dtype,
        cache_stride=options.cache_stride,
        text_padding=options.text_padding,
        cache_gib=options.cache_gib,
    )
    policies = tuple(options.policy or get_args(RoutingPolicy))
    schedulings = tuple(options.scheduling or ("fcfs",))
    bench_simulate(title, workload, shape, policies, setup, options.json, schedulings, options.slo_scale)


def add_bench_deadlines(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_deadlines)
    several = "; may be given several times"

    def add(name: str, kind: Callable[[str], object], metavar: str, about: str) -> None:
        parser.add_argument(name, action="append", type=kind, metavar=metavar, help=about + several)

    add("--workload", str, "NAME", "sizes, steps, production, inpaint or retouch (default all)")
    add("--workers", positive, "N", "workers of the cluster (default 1)")
    add("--load", rate, "X", "arrivals, as a share of what full batches reach (default .3 to .9)")
    add("--neighbour", rate, "X", "also a quiet tenant beside a noisy one of this load")
    about_scheduling = f"policy (default all){several}"
    parser.add_argument("--scheduling", action="append", choices=get_args(Scheduling), help=about_scheduling)
    parser.add_argument("--seconds", type=rate, default=1200.0, metavar="S", help="simulated load (default 1200)")
    about_edits = "most edits of a simulation: large clusters get a shorter load (default 20000)"
    parser.add_argument("--max-edits", type=positive, default=20_000, metavar="N", help=about_edits)
    about_slo = "deadline, as a multiple of what an edit takes alone (default 5)"
    parser.add_argument("--slo-scale", type=rate, default=5.0, metavar="FACTOR", help=about_slo)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the workloads (default 0)")
    parser.add_argument("--model", default="dummy:flux.1-dev", help="model whose steps are simulated")
    add_latency(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the charts into this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run_bench_deadlines(options: argparse.Namespace) -> None:
    from instgenie.bench.deadlines import DeadlineStudy, bench_deadlines  # imports torch and diffusers
    from instgenie.bench.simulate import Setup

    hide_loading_bars()
    default = DeadlineStudy()
    study = DeadlineStudy(
        workloads=tuple(options.workload or default.workloads),
        workers=tuple(options.workers or default.workers),
        loads=tuple(options.load or default.loads),
        policies=tuple(options.scheduling or default.policies),
        seconds=options.seconds,
        max_edits=options.max_edits,
        slo_scale=options.slo_scale,
        seed=options.seed,
        neighbours=tuple(options.neighbour or ()),
    )
    side, is_near = SideSeconds(prepare=0.05, decode=0.05), options.kind == "cpu"  # a CPU reads main memory directly
    setup = Setup(options.model, options.kind, options.latency, "exact", is_near, side)
    bench_deadlines(setup, study, options.out, options.json)


def add_bench_predictors(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_predictors)
    parser.add_argument("--mixes", type=positive, default=300, metavar="N", help="batches to measure (default 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the mixes (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


def run_bench_predictors(options: argparse.Namespace) -> None:
    from instgenie.bench.predictors import bench_predictors  # imports torch and diffusers

    hide_loading_bars()
    bench_predictors(options.model, options.device, options.size, options.mixes, options.seed, options.json)

"""`instgenie bench serve`: a server under load; `instgenie bench remote`: a worker on another machine."""

import argparse
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import get_args

from instgenie.cli.arguments import add_model, positive, rate
from instgenie.cli.workload import add_workload, make_workload, recipe_of
from instgenie.scheduling.names import Scheduling

LOADS = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_serve)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="address of the server")
    parser.add_argument("--api-key", metavar="KEY", help="key that the server asks for")
    about_compare = "start servers in turn: ours, and static and naive batches that compute every token"
    parser.add_argument("--compare", action="store_true", help=about_compare)
    about_against = "with --compare: compare with these batches alone (default both)"
    parser.add_argument("--against", choices=("static", "naive"), help=about_against)
    about_flags = "flags of every server that is started, as one text, for example '--cache-stride 7'"
    parser.add_argument("--server-flags", type=shlex.split, default=(), metavar="FLAGS", help=about_flags)
    about_new = "every edit has a picture of its own, and none is registered"
    parser.add_argument("--new-pictures", action="store_true", help=about_new)
    about_concurrency = "limit of unanswered edits (default 256)"
    parser.add_argument("--max-concurrency", type=positive, default=256, metavar="N", help=about_concurrency)
    about_slo = "deadline of an edit, as a multiple of its latency on an idle server (default 2; with --scheduling 5)"
    parser.add_argument("--slo-scale", type=rate, metavar="X", help=about_slo)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_scheduling(parser)
    add_workload(parser)
    add_model(parser, has_size=False)


def add_scheduling(parser: argparse.ArgumentParser) -> None:
    several = "; may be given several times"
    about = (
        "compare policies, separated by commas: each has a server, whose requests give deadlines. The rates follow "
        "from --load, the number of edits from --seconds; results are in the folder --out"
    )
    parser.add_argument("--scheduling", type=policies, metavar="NAMES", help=about)
    about_load = f"with --scheduling: arrivals, as a share of what the server sustains (default {LOADS[0]:g} to 1)"
    parser.add_argument("--load", action="append", type=rate, metavar="X", help=about_load + several)
    about_seconds = "with --scheduling: seconds of each load (default 60)"
    parser.add_argument("--seconds", type=rate, default=60.0, metavar="S", help=about_seconds)
    about_out = "with --scheduling: folder for the record and the chart; what is measured already is kept"
    parser.add_argument("--out", type=Path, default=Path("attainment"), metavar="FOLDER", help=about_out)
    about_together = "with --scheduling: start all servers at once and let them take turns at each load"
    parser.add_argument("--together", action="store_true", help=about_together)


def policies(text: str) -> list[Scheduling]:
    known = {name: name for name in get_args(Scheduling)}
    try:
        return [known[name] for name in text.split(",")]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"{unknown} is not one of {', '.join(known)}") from None


def run_bench_serve(options: argparse.Namespace) -> None:
    from instgenie.bench.serve import SYSTEMS, ServeStudy, bench_serve, compare

    if options.scheduling:
        run_scheduling(options)
        return
    title, workload = make_workload(options)
    if options.new_pictures:
        workload = tuple(replace(arrival, template=number) for number, arrival in enumerate(workload))
    study = ServeStudy(
        title,
        workload,
        options.max_concurrency,
        options.slo_scale or 2.0,
        registers=not options.new_pictures,
        flags=tuple(options.server_flags),
    )
    if options.compare:
        others = (options.against,) if options.against else ("static", "naive")
        systems = [name for name in SYSTEMS if name.startswith(("instgenie", *others))]
        compare(study, systems, options.model, options.device, options.json)
    else:
        bench_serve(study, options.base_url, options.api_key, options.json)


def run_scheduling(options: argparse.Namespace) -> None:
    from instgenie.bench.attainment import bench_attainment
    from instgenie.bench.served import ServedStudy

    if options.workload or options.arrivals or options.new_pictures or math.isfinite(options.request_rate):
        options.parser.error("--scheduling draws its own arrivals: give --load and --seconds")
    study = ServedStudy(
        model=options.model,
        device=options.device,
        recipe=replace(recipe_of(options), rate=1.0, num_edits=1),  # both follow from the load
        seconds=options.seconds,
        slo_scale=options.slo_scale or 5.0,
        flags=tuple(options.server_flags),
    )
    loads = sorted(options.load or LOADS)
    bench_attainment(study, options.scheduling, loads, options.out, options.together)


def add_bench_remote(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_remote)
    parser.add_argument("--repeats", type=positive, default=200, metavar="N", help="jobs per socket (default 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run_bench_remote(options: argparse.Namespace) -> None:
    from instgenie.bench.remote import bench_remote

    bench_remote(options.repeats, options.json)

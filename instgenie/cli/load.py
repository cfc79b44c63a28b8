"""`instgenie bench serve`: a server under load."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import get_args

from instgenie.cli.arguments import add_model, positive, rate
from instgenie.cli.workload import add_workload, make_workload
from instgenie.scheduling.names import Scheduling


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
    about_scheduling = "start a server with this policy; may be given several times: they take turns"
    parser.add_argument("--scheduling", action="append", choices=get_args(Scheduling), help=about_scheduling)
    about_concurrency = "limit of unanswered edits (default 256)"
    parser.add_argument("--max-concurrency", type=positive, default=256, metavar="N", help=about_concurrency)
    about_slo = "deadline of an edit, as a multiple of its latency on an idle server (default 2)"
    parser.add_argument("--slo-scale", type=rate, default=2.0, metavar="X", help=about_slo)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_workload(parser)
    add_model(parser, has_size=False)


def run_bench_serve(options: argparse.Namespace) -> None:
    from instgenie.bench.serve import SYSTEMS, ServeStudy, bench_serve, compare, compare_scheduling

    title, workload = make_workload(options)
    if options.new_pictures:
        workload = tuple(replace(arrival, template=number) for number, arrival in enumerate(workload))
    study = ServeStudy(
        title,
        workload,
        options.max_concurrency,
        options.slo_scale,
        registers=not options.new_pictures,
        flags=tuple(options.server_flags),
    )
    if options.scheduling:
        compare_scheduling(study, options.scheduling, options.model, options.device, options.json)
    elif options.compare:
        others = [options.against] if options.against else ["static", "naive"]
        systems = [name for name in SYSTEMS if name.split()[0] in ("instgenie", *others)]
        compare(study, systems, options.model, options.device, options.json)
    else:
        bench_serve(study, options.base_url, options.api_key, options.json)

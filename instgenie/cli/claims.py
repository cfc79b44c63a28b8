"""`instgenie bench table`: the table of claims about performance, from JSON to Markdown."""

import argparse
from pathlib import Path


def add_bench_table(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_table)
    parser.add_argument("claims", type=Path, metavar="FILE", help="JSON file of claims, such as docs/performance.json")
    about_add = "first add the rows of this file of instgenie bench edit --json to FILE; may be given several times"
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="EDITS", help=about_add)
    about_into = "write the table between the marks of this Markdown page instead of printing it"
    parser.add_argument("--into", type=Path, metavar="PAGE", help=about_into)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if PAGE shows another table")


def run_bench_table(options: argparse.Namespace) -> None:
    from instgenie.bench.claims import (
        claims_of_edits,
        merge_claims,
        put_claims,
        read_claims,
        render_claims,
        write_claims,
    )

    if options.check and (options.add or not options.into):
        options.parser.error("--check goes with --into and not with --add")
    claims = read_claims(options.claims)
    for path in options.add:
        claims = merge_claims(claims, claims_of_edits(path))
    if options.add:
        write_claims(claims, options.claims)
    if options.into:
        put_claims(claims, options.into, only_check=options.check)
    else:
        print(render_claims(claims), end="")

"""`instgenie bench load`: the time to load a pipeline's folder."""

import argparse
from pathlib import Path

from instgenie.cli.screen import hide_loading_bars


def add_bench_load(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_load)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a diffusers pipeline")
    about_write = "first write a model with random weights of published size, dummy:NAME, into FOLDER"
    parser.add_argument("--write", metavar="dummy:NAME", help=about_write)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", help="dtype of the weights on the device (default: its own)")
    about_cold = "also load after the files were dropped from the page cache"
    parser.add_argument("--cold", action="store_true", help=about_cold)
    about_serve = "also time instgenie serve, until it answers that it is ready"
    parser.add_argument("--serve", action="store_true", help=about_serve)
    about_fp8 = "also load with large weights in one byte each"
    parser.add_argument("--fp8", action="store_true", help=about_fp8)
    about_mapped = "also load with diffusers' device_map"
    parser.add_argument("--device-map", action="store_true", help=about_mapped)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run_bench_load(options: argparse.Namespace) -> None:
    from instgenie.bench.loading import WAYS, LoadStudy, bench_loading
    from instgenie.telemetry.progress import show_status

    if options.write:
        with show_status(f"writing {options.write} into {options.folder}"):
            from instgenie.machine.device import choose_device  # imports torch and diffusers
            from instgenie.models.loading.write import write_dummy

            hide_loading_bars()
            write_dummy(options.write, options.folder, choose_device(options.device))
    more = (("instgenie fp8",) if options.fp8 else ()) + (("diffusers mapped",) if options.device_map else ())
    study = LoadStudy(options.folder, options.device, options.dtype, (*WAYS, *more), options.cold, options.serve)
    bench_loading(study, options.json)

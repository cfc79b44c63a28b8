"""The command line: edit or register a photograph, serve, measure. Knows arguments and files; others know the rest."""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from instgenie.cache.folder import default_folder, make_folder
from instgenie.errors import CacheError, InstGenieError, PictureError
from instgenie.mask import box_mask, read_mask
from instgenie.options import add_flags, nearest
from instgenie.picture import check_edit, check_target, open_picture, save_picture
from instgenie.quality import DEFAULT, Quality, with_quality
from instgenie.server.config import MODEL, OPTIONS, read_config
from instgenie.types import Edit, PixelMask, Pixels, Registered, Result

if TYPE_CHECKING:
    from instgenie.activations import Kind
    from instgenie.cache.store import Store
    from instgenie.editor import Editor

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
CACHE_GIB = 20.0


class Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An option that does not exist is refused with the nearest one that does."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(options, "parser", self)
            command.error(f"unknown argument {unknown[0]}{nearest(unknown[0], command._option_string_actions)}")
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    quiet_libraries()
    try:
        return options.run(options) or 0
    except InstGenieError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED


def complain(text: str) -> None:
    print(f"instgenie: {' '.join(text.split())}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="instgenie", description="Mask-guided image editing.")
    parser.add_argument("--version", action="version", version=f"instgenie {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_edit(commands.add_parser("edit", help="edit a photograph", description="Edit a photograph."))
    about_register = "Compute ahead what edits of a photograph can reuse, and keep it in the cache."
    add_register(commands.add_parser("register", help="prepare a photograph for edits", description=about_register))
    about_calibrate = "Measure this device with the model's own steps, and keep what planning needs to know of it."
    add_calibrate(commands.add_parser("calibrate", help="measure this device", description=about_calibrate))
    about_serve = (
        "Serve OpenAI's images API. Every option may also be an environment variable or a line of a TOML file."
    )
    add_serve(commands.add_parser("serve", help="serve OpenAI's images API", description=about_serve))
    bench = commands.add_parser("bench", help="measure speed and quality", description="Measure speed and quality.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    about_bench = "Time edits through diffusers' own pipeline and through our engine, dense and cached, side by side."
    add_bench_edit(benches.add_parser("edit", help="edits, beside diffusers", description=about_bench))
    about_quality = "Edit held-out photographs with every method, same seeds, and compare with the dense edits."
    add_bench_quality(benches.add_parser("quality", help="fidelity against cost", description=about_quality))
    about_load = "Send edits to a running server, or to three kinds of servers in turn, and time the answers."
    add_bench_serve(benches.add_parser("serve", help="a load on a server", description=about_load))
    about_router = "Time the router's decision, with every policy, among 8 to 256 busy workers."
    add_bench_router(benches.add_parser("router", help="the choice of a worker", description=about_router))
    return parser


def own_version() -> str:
    try:
        return version("instgenie")
    except PackageNotFoundError:
        return "(not installed)"


def add_edit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_edit)
    parser.add_argument("photo", metavar="PHOTO", type=Path, help="PNG, JPEG or WebP of any size")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the masked part becomes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--mask", type=Path, help="picture of the same size that says where to edit")
    where.add_argument("--box", type=box, metavar="X,Y,W,H", help="edit this box; no mask and no box = everything")
    about_mode = "alpha: 0 is edited (the default); luma: white is edited"
    parser.add_argument("--mask-mode", choices=["alpha", "luma"], default="alpha", help=about_mode)
    about_output = "PNG or WebP (exact) or JPEG; default: PHOTO's name with .edit.png, in the current folder"
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help=about_output)

    def add(name: str, kind: type[int] | type[float] | type[str], about: str) -> None:
        metavar = "TEXT" if kind is str else "N"
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)

    add("--seed", int, "same seed and same use of the cache, same picture (default 0)")
    add("--steps", int, "number of denoising steps; default: what suits the model")
    add("--guidance", float, "how strongly the prompt is followed; default: what suits the model")
    add("--true-guidance", float, "classifier-free guidance against the negative prompt (default 1 = off)")
    add("--negative-prompt", str, "what true guidance leads away from")
    add("--strength", float, "share of the steps that is run; below 1 keeps traces of what was there (default 1)")
    add("--feather", int, "width in pixels of a soft edge inside the mask (default 0)")
    about_quality = (
        "how close an edit of a registered picture keeps to the dense one; exact is dense (default balanced)"
    )
    parser.add_argument("--quality", choices=get_args(Quality), default=DEFAULT, help=about_quality)
    add_model(parser)
    about_cache = "neither look for the photograph's activations nor keep any"
    parser.add_argument("--no-cache", action="store_true", help=about_cache)
    about_register = "do not register a photograph that is not in the cache once its edit is done"
    parser.add_argument("--no-register", action="store_true", help=about_register)
    add_cache(parser)


def add_register(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_register)
    parser.add_argument("photo", metavar="PHOTO", type=Path, help="PNG, JPEG or WebP of any size")
    suits = "what suits the model"
    parser.add_argument("--steps", type=int, metavar="N", help=f"of the edits to come; default: {suits}")
    parser.add_argument("--guidance", type=float, metavar="N", help=f"of the edits to come; default: {suits}")
    about_kind = "what is kept of each block: K and V (the default), or half the bytes and more to compute"
    parser.add_argument("--kind", choices=["kv", "y"], default="kv", help=about_kind)
    add_model(parser)
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    about_folder = "folder of the cache; default: instgenie/templates in the user's cache folder"
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help=about_folder)
    about_gib = f"most the cache may hold; what was used least recently goes first (default {CACHE_GIB:g})"
    parser.add_argument("--cache-gib", type=gib, default=CACHE_GIB, metavar="N", help=about_gib)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_calibrate)
    about_out = "where the figures go, a plot beside them; default: the user's cache folder, by device and model"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about_out)
    add_model(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_serve, parser=parser)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL.about)
    about_file = "TOML file with any of these options; --port is port = 8000 there and INSTGENIE_PORT outside"
    parser.add_argument("--config", metavar="FILE", help=about_file)
    add_flags(parser, OPTIONS)


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
    systems = ["diffusers", "dense", "cached"]
    add_several("--system", "systems", "what is measured (default all)", choices=systems)
    parser.add_argument("--no-kernels", action="store_true", help="plain torch instead of fused kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


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


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_serve, parser=parser)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    parser.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    about_compare = "start three servers in turn: continuous batching with reuse, static batching, one by one"
    parser.add_argument("--compare", action="store_true", help=about_compare)
    parser.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="edits to send (default 64)")
    about_rate = "edits that arrive in a second, in the mean (default: all at once)"
    parser.add_argument("--request-rate", type=rate, default=math.inf, metavar="R", help=about_rate)
    about_concurrency = "edits that may be on their way at once (default 256)"
    parser.add_argument("--max-concurrency", type=positive, default=256, metavar="N", help=about_concurrency)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same load (default 0)")
    about_ratios = "production (the default), inpaint, retouch, or a file of numbers"
    parser.add_argument("--mask-ratios", default="production", metavar="FILE", help=about_ratios)
    about_slo = "an edit is in time within so many times what it takes alone (default 2)"
    parser.add_argument("--slo-scale", type=rate, default=2.0, metavar="X", help=about_slo)
    about_templates = "different pictures that are edited (default 4)"
    parser.add_argument("--num-templates", type=positive, default=4, metavar="N", help=about_templates)
    parser.add_argument("--steps", type=positive, metavar="N", help="denoising steps; default: the model's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add_model(parser)


def add_bench_router(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_bench_router)
    parser.add_argument("--repeats", type=positive, default=2000, metavar="N", help="decisions (default 2000)")


def add_model(parser: argparse.ArgumentParser, has_size: bool = True) -> None:
    parser.add_argument(
        "--model", default="builtin", help="a pipeline folder, a hub id, builtin (the default), or dummy:NAME"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; default: the best there is")
    if has_size:
        parser.add_argument("--size", type=size, metavar="WxH", help="size the model works at; default: its own")


def box(text: str) -> tuple[int, int, int, int]:
    try:
        x, y, w, h = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not x,y,width,height in whole pixels") from None
    return x, y, w, h


def size(text: str) -> tuple[int, int]:
    try:
        width, height = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in whole pixels") from None
    return height, width


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def gib(text: str) -> float:
    value = number(text)
    if not 0 < value < 2**30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB above 0")
    return value


def number(text: str) -> float:
    """0 where it is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def ratio(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def quiet_libraries() -> None:
    """What libraries say to developers is not for the users of a command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def hide_loading_bars() -> None:
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def run_edit(options: argparse.Namespace) -> None:
    output = options.output or Path(f"{options.photo.stem}.edit.png")
    check_output(output, options)
    picture = open_picture(options.photo)
    given = {field.name: getattr(options, field.name) for field in fields(Edit) if hasattr(options, field.name)}
    given |= {"picture": picture, "mask": make_mask(picture, options)}
    check_edit(Edit(**given))
    folder = None if options.no_cache else find_cache(options)
    console = Console(stderr=True)
    start = time.perf_counter()
    editor = make_editor(options, folder, console)
    suited = {"steps": editor.model.steps, "guidance": editor.model.guidance}
    edit = with_quality(Edit(**suited | given), options.quality)
    with edit_progress(console) as progress:
        [result] = editor.edit_many([edit], show_steps(progress, "editing"))
    save_picture(result.picture, output)
    print_summary(result, edit, editor, time.perf_counter() - start)
    print(output, flush=True)
    if editor.cache and result.can_reuse and not result.cache_hit and not options.no_register:
        register_behind(edit, editor, console)


def find_cache(options: argparse.Namespace) -> Path | None:
    """An edit does without the user's own cache folder where that is of no use, but not without one that was named."""
    if options.cache_dir:
        return make_folder(options.cache_dir)
    try:
        return make_folder(default_folder())
    except CacheError as error:
        complain(f"no cache: {error}")
        return None


def make_editor(options: argparse.Namespace, folder: Path | None, console: Console) -> "Editor":
    with console.status("loading the model"):
        from instgenie.editor import Editor  # brings torch and diffusers, seconds that bad input need not wait for

        hide_loading_bars()
        cache = open_cache(folder, options.cache_gib) if folder else None
        return Editor(model=options.model, device=options.device, cache=cache)


def open_cache(folder: Path, limit: float) -> "Store":
    from instgenie.cache.disk import DiskTier
    from instgenie.cache.store import Store

    return Store(disk=DiskTier(folder, max_bytes=int(limit * 2**30)))


def register_behind(edit: Edit, editor: "Editor", console: Console) -> None:
    """The edit is done and saved: whatever goes wrong from here on is worth a line and no more."""
    try:
        register(editor, edit.picture, edit.size, edit.steps, edit.guidance, "kv", console)
    except KeyboardInterrupt:
        complain("registering was interrupted: the next edit of this photograph goes on where it ended")
    except InstGenieError as error:
        complain(f"not registered: {error}")


def register(
    editor: "Editor",
    picture: Pixels,
    size: tuple[int, int] | None,
    steps: int | None,
    guidance: float | None,
    kind: "Kind",
    console: Console,
) -> Registered:
    with edit_progress(console) as progress:
        return editor.register(picture, size, steps, guidance, kind, show_steps(progress, "registering"))


def run_register(options: argparse.Namespace) -> None:
    picture = open_picture(options.photo)
    folder = make_folder(options.cache_dir or default_folder())
    console = Console(stderr=True)
    editor = make_editor(options, folder, console)
    start = time.perf_counter()
    registered = register(editor, picture, options.size, options.steps, options.guidance, options.kind, console)
    seconds = time.perf_counter() - start
    if registered.num_computed_steps:
        print(f"registered {registered.num_computed_steps} of {registered.num_steps} steps in {seconds:.1f} seconds")
    else:
        print(f"already registered: {registered.num_steps} steps")
    print(f"{decimal(registered.num_bytes)} in {folder}")


def check_output(output: Path, options: argparse.Namespace) -> None:
    check_target(output)
    for given in (options.photo, options.mask):
        if given and os.path.exists(output) and os.path.exists(given) and os.path.samefile(output, given):
            raise PictureError(f"{output} is an input of this edit and will not be overwritten: name another with -o")


def make_mask(picture: Pixels, options: argparse.Namespace) -> PixelMask:
    height, width, _ = picture.shape
    if options.mask:
        return read_mask(options.mask, (height, width), options.mask_mode)
    return box_mask(options.box or (0, 0, width, height), (height, width))


def edit_progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def show_steps(progress: Progress, name: str) -> Callable[[int, int], None]:
    """What an editor calls after each step, to move a new line of the progress bar."""
    task = progress.add_task(name, total=None)

    def on_step(num_done: int, num_steps: int) -> None:
        progress.update(task, completed=num_done, total=num_steps)

    return on_step


def print_summary(result: Result, edit: Edit, editor: "Editor", seconds: float) -> None:
    from instgenie.engine.prepare import choose_size

    height, width, _ = result.picture.shape
    working_height, working_width = choose_size(edit, editor.model)
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in vars(result.seconds).items())
    lines = {
        "picture": f"{width}x{height}, worked on at {working_width}x{working_height}",
        "masked": f"{result.masked_share:.0%}, {result.num_masked_tokens} of {result.num_tokens} tokens",
        "computed": f"{result.num_computed_tokens} of {result.num_tokens} tokens",
        "cache": describe_cache(result, is_on=editor.cache is not None),
        "seconds": f"{seconds:.1f} with loading the model ({parts})",
        "seed": f"{result.seed}",
    }
    for name, value in lines.items():
        print(f"{name:<8} {value}")


def describe_cache(result: Result, is_on: bool) -> str:
    if result.cache_tier:
        return f"hit ({result.cache_tier})"
    if not is_on:
        return "off"
    return "miss" if result.can_reuse else "not asked: nothing to reuse"


def run_serve(options: argparse.Namespace) -> int:
    config = read_config(vars(options), os.environ)
    from instgenie.server.serve import serve  # brings the web framework

    return serve(config, own_version())


def run_bench_edit(options: argparse.Namespace) -> None:
    from instgenie.bench.edit import Study, bench_edit  # brings torch and diffusers
    from instgenie.kernels.switch import kernels

    hide_loading_bars()
    given = {field.name: getattr(options, field.name) for field in fields(Study) if hasattr(options, field.name)}
    asked: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    study = Study(**asked)
    with kernels(enabled=not options.no_kernels):
        bench_edit(options.model, options.device, options.size, study, options.json)


def run_calibrate(options: argparse.Namespace) -> None:
    from instgenie.bench.calibrate import calibrate  # brings torch and diffusers

    hide_loading_bars()
    calibrate(options.model, options.device, options.size, options.out)


def run_bench_quality(options: argparse.Namespace) -> None:
    from instgenie.bench.quality import bench_quality  # brings torch and diffusers

    hide_loading_bars()
    what = options.photos, options.num, options.model, options.device, options.steps, options.seed
    bench_quality(*what, not options.no_networks, options.json, options.out)


def run_bench_serve(options: argparse.Namespace) -> None:
    from instgenie.bench.serve import Plan, bench_serve, compare

    plan = Plan(
        num_prompts=options.num_prompts,
        request_rate=options.request_rate,
        max_concurrency=options.max_concurrency,
        seed=options.seed,
        mask_ratios=options.mask_ratios,
        slo_scale=options.slo_scale,
        num_templates=options.num_templates,
        size=options.size or (256, 256),
        steps=options.steps,
    )
    if options.compare:
        compare(plan, options.model, options.device, options.json)
    else:
        bench_serve(plan, options.base_url, options.api_key, options.json)


def run_bench_router(options: argparse.Namespace) -> None:
    from instgenie.bench.router import bench_router

    bench_router(options.repeats)

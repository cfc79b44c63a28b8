"""`instgenie edit` and `instgenie register`: files and flags; the editor does the rest."""

import argparse
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.filesize import decimal

from instgenie.cache.folder import default_folder, make_folder
from instgenie.cli.arguments import (
    add_cache,
    add_convolutions,
    add_model,
    add_quantization,
    add_reuse_changed,
    add_weights_dtype,
    box,
    control,
    lora,
    named_path,
)
from instgenie.cli.screen import complain, hide_loading_bars
from instgenie.errors import CacheError, InstGenieError, PictureError
from instgenie.jobs.quality import DEFAULT, Quality, with_quality
from instgenie.pictures.control import MADE_HERE, NEEDS, read_controls
from instgenie.pictures.cropping import crop_edit
from instgenie.pictures.fitting import name
from instgenie.pictures.mask import MaskMode, box_mask, read_mask
from instgenie.pictures.photo import Metadata, Photo, open_photo
from instgenie.pictures.picture import check_edit, check_target, open_picture, save_picture
from instgenie.telemetry.progress import Progress, show_loading, show_status
from instgenie.types import CropMode, Edit, MaskedContent, Notes, PixelMask, Pixels, RegisterResult, Result, Reuse

if TYPE_CHECKING:
    from instgenie.cache.store import Store
    from instgenie.editor import Editor
    from instgenie.jobs.activations import Kind


def add_edit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_edit)
    parser.add_argument("photo", metavar="PHOTO", type=Path, help="PNG, JPEG or WebP of any size")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the masked part becomes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--mask", type=Path, help="picture of the same size that marks where to edit")
    where.add_argument(
        "--box", type=box, metavar="X,Y,W,H", help="edit this box; without a mask and a box, edit everything"
    )
    about_mode = (
        "alpha: transparent pixels are edited; luma: white pixels are edited; "
        "auto: alpha, or luma if the mask is opaque and black and white (the default)"
    )
    parser.add_argument("--mask-mode", choices=get_args(MaskMode), default="auto", help=about_mode)
    about_output = (
        "output file, PNG or WebP (exact) or JPEG; default: PHOTO's name with .edit.png in the current folder"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help=about_output)

    about_reference = "picture that the model looks at beside PHOTO, if it can; may be given several times"
    parser.add_argument("--reference", type=Path, action="append", default=[], metavar="FILE", help=about_reference)
    about_metadata = "EXIF to keep: all but the place (safe, the default), all of it, or none"
    parser.add_argument("--metadata", choices=get_args(Metadata), default="safe", help=about_metadata)

    def add(name: str, kind: type[int] | type[float] | type[str], about: str) -> None:
        metavar = "TEXT" if kind is str else "N"
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)

    add(
        "--seed",
        int,
        "seed of the noise; the same seed and the same cached activations give the same picture (default 0)",
    )
    add("--steps", int, "number of denoising steps; default: the model's own")
    add("--guidance", float, "how strongly the prompt is followed; default: the model's own")
    add("--true-guidance", float, "classifier-free guidance against the negative prompt (default 1: off)")
    add("--negative-prompt", str, "what true guidance steers away from")
    add(
        "--strength",
        float,
        "share of the steps to run; below 1 it keeps traces of the original (default 1; from surroundings, the one "
        "that suits the model)",
    )
    about_content = (
        "what the masked part starts from, under the noise of a strength below 1: what is there (original, the "
        "default), or the colours around it (surroundings), with a strength to remove things by"
    )
    parser.add_argument("--masked-content", choices=get_args(MaskedContent), default="original", help=about_content)
    add("--feather", int, "width in pixels of a soft edge inside the mask (default 0)")
    about_quality = (
        "closeness to the dense edit: fast, balanced (the default), exact (dense); adaptive finds the dense steps of "
        "an edit without cached activations as it goes"
    )
    about_crop = (
        "auto: edit a crop around the mask if that gives the masked part more detail (the default); masked: always; "
        "off: edit the whole photograph"
    )
    parser.add_argument("--crop", choices=get_args(CropMode), default="auto", help=about_crop)
    add("--crop-padding", int, "pixels that a crop shows around the mask at least; default: a quarter of its size")
    parser.add_argument("--quality", choices=get_args(Quality), default=DEFAULT, help=about_quality)
    about_reuse = (
        "auto: read cached activations if there are any, or else those that the edit's own dense steps leave behind "
        "(the default); own: always the latter; template: register the photograph first if need be; off: compute every "
        "token. With each of the last three, the same seed always gives the same picture"
    )
    parser.add_argument("--reuse", choices=get_args(Reuse), default="auto", help=about_reuse)
    about_lora = "a LoRA to paint with: a file, or a name in --lora-dir, and maybe its scale; repeatable"
    parser.add_argument(
        "--lora", dest="loras", action="append", type=lora, default=argparse.SUPPRESS, metavar="LORA[:SCALE]",
        help=about_lora,
    )  # fmt: skip
    about_controlnet = "a name for a folder with a ControlNet; repeatable"
    parser.add_argument(
        "--controlnet", dest="controlnets", action="append", type=named_path, default=[], metavar="NAME=PATH",
        help=about_controlnet,
    )  # fmt: skip
    about_control = (
        "let a ControlNet guide the edit with an image: a file, or canny for the photograph's edges; maybe its scale, "
        "and the shares of the steps between which it guides; repeatable"
    )
    parser.add_argument(
        "--control", dest="given_controls", action="append", type=control, default=[],
        metavar="NAME[:SCALE[:START-END]]=IMAGE", help=about_control,
    )  # fmt: skip
    parser.add_argument("--lora-dir", type=Path, metavar="DIR", help="folder of LoRAs that are named by their files")
    add_model(parser)
    add_quantization(parser)
    add_weights_dtype(parser)
    add_convolutions(parser)
    add_reuse_changed(parser)
    about_cache = "neither read nor write cached activations"
    parser.add_argument("--no-cache", action="store_true", help=about_cache)
    about_register = "register the photograph after the edit, for further edits of it, if it is not in the cache"
    parser.add_argument("--register", action="store_true", help=about_register)
    parser.add_argument("--no-register", action="store_true", help=argparse.SUPPRESS)  # the default
    add_cache(parser)


def run_edit(options: argparse.Namespace) -> None:
    output = options.output or Path(f"{options.photo.stem}.edit.png")
    check_output(output, options)
    photo = open_photo(options.photo, metadata=options.metadata)
    notes = list(photo.notes)
    given = {field.name: getattr(options, field.name) for field in fields(Edit) if hasattr(options, field.name)}
    given |= {"loras": tuple(given.get("loras", ()))}
    given |= open_controls(options, photo.pixels)
    given |= {"picture": photo.pixels, "mask": make_mask(photo, options, notes), "source": photo.source}
    given["references"] = tuple(open_photo(path).pixels for path in options.reference)
    check_edit(Edit(**given))
    for note in notes:
        complain(note)
    folder = None if options.no_cache else find_cache(options)
    console = Console(stderr=True)
    start = time.perf_counter()
    editor = make_editor(options, folder, console)
    edit = with_quality(Edit(**editor.suited(given)), options.quality)
    with Progress(console) as progress:
        [result] = editor.edit_many([edit], progress.add("editing").update)
    save_picture(result.picture, output, photo.source)
    if result.crop:
        edit = crop_edit(edit, result.crop)
    elif editor.choose_crop(edit):
        complain("the whole photograph was edited with its template: --crop masked edits a sharper crop instead")
    print_summary(result, edit, editor, time.perf_counter() - start)
    print(output, flush=True)
    is_wanted = result.can_reuse and not result.cache_hit and options.register and not options.no_register
    if editor.cache and is_wanted:
        register_behind(edit, editor, console)


def check_output(output: Path, options: argparse.Namespace) -> None:
    check_target(output)
    for given in (options.photo, options.mask):
        if given and os.path.exists(output) and os.path.exists(given) and os.path.samefile(output, given):
            raise PictureError(
                f"{output} is an input of this edit and will not be overwritten: name another file with -o"
            )


def open_controls(options: argparse.Namespace, picture: Pixels) -> dict[str, Any]:
    """The ControlNets of an edit with their images."""
    given = options.given_controls
    files = [one if one["image"] == MADE_HERE or one["image"] in NEEDS else open_control(one) for one in given]
    controls, images = read_controls(files, picture)
    return {"controls": controls, "control_images": images}


def open_control(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"image": open_picture(given["image"])}


def make_mask(photo: Photo, options: argparse.Namespace, notes: Notes) -> PixelMask:
    height, width, _ = photo.pixels.shape
    if options.mask:
        return read_mask(options.mask, (height, width), options.mask_mode, orientation=photo.orientation, notes=notes)
    return box_mask(options.box or (0, 0, width, height), (height, width))


def print_summary(result: Result, edit: Edit, editor: "Editor", seconds: float) -> None:
    from instgenie.engine.prepare import choose_size

    height, width, _ = result.picture.shape
    working_height, working_width = choose_size(edit, editor.model)
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in vars(result.seconds).items())
    crop = f", a crop of {name(result.crop.size)}" if result.crop else ""
    lines = {
        "picture": f"{width}x{height}{crop}, worked on at {working_width}x{working_height}",
        "masked": f"{result.masked_share:.0%}, {result.num_masked_tokens} of {result.num_tokens} tokens",
        "computed": f"{result.num_computed_tokens} of {result.num_tokens} tokens",
        "cache": describe_cache(result, is_on=editor.cache is not None and edit.reuse not in ("off", "own")),
        "reuse": {"template": "cached activations", "own": "its own dense steps", "none": "none"}[result.reuse],
        "seconds": f"{seconds:.1f} with loading the model ({parts})",
        "seed": f"{result.seed}",
    }
    if edit.loras:
        lines["loras"] = ", ".join(f"{use.name} at {use.scale:g}" for use in edit.loras)
    if edit.controls:
        lines["controls"] = ", ".join(f"{use.name} at {use.scale:g}" for use in edit.controls)
    for heading, value in lines.items():
        print(f"{heading:<8} {value}")


def describe_cache(result: Result, is_on: bool) -> str:
    if result.cache_tier:
        return f"hit ({result.cache_tier})"
    if not is_on:
        return "off"
    return "miss" if result.can_reuse else "not used: nothing to reuse"


def add_register(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_register)
    parser.add_argument("photo", metavar="PHOTO", type=Path, help="PNG, JPEG or WebP of any size")
    suits = "the model's own"
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of the edits to come; default: {suits}")
    parser.add_argument("--guidance", type=float, metavar="N", help=f"guidance of the edits to come; default: {suits}")
    about_kind = (
        "activations to keep per block: K and V (kv, the default), or its input (y), half the bytes but more to compute"
    )
    parser.add_argument("--kind", choices=["kv", "y"], default="kv", help=about_kind)
    add_model(parser)
    add_quantization(parser)
    add_weights_dtype(parser)
    add_cache(parser)


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


def register_behind(edit: Edit, editor: "Editor", console: Console) -> None:
    """Register the photograph of a saved edit; a failure here is only reported."""
    try:
        register(editor, edit.picture, edit.size, edit.steps, edit.guidance, "kv", console, edit.references)
    except KeyboardInterrupt:
        complain("registering was interrupted: the next edit of this photograph resumes it")
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
    references: tuple[Pixels, ...] = (),
) -> RegisterResult:
    """Register a photograph, and return when all of it is written."""
    with Progress(console) as progress:
        on_step = progress.add("registering").update
        registered = editor.register(picture, size, steps, guidance, kind, on_step, references)
        editor.store.settle()
    return registered


def find_cache(options: argparse.Namespace) -> Path | None:
    """Return the cache folder. An unusable default folder only turns the cache off; one that was named is an error."""
    if options.cache_dir:
        return make_folder(options.cache_dir)
    try:
        return make_folder(default_folder())
    except CacheError as error:
        complain(f"no cache: {error}")
        return None


def make_editor(options: argparse.Namespace, folder: Path | None, console: Console) -> "Editor":
    with show_status("loading the model", console):
        from instgenie.editor import (
            Editor,
        )  # imports torch and diffusers, which takes seconds: bad input is found before

        hide_loading_bars()
        cache = open_cache(folder, options.cache_gib) if folder else None
    with show_loading("loading the model", console) as on_bytes:
        return Editor(
            options.model,
            options.device,
            cache=cache,
            cache_dtype=options.cache_dtype,
            cache_stride=options.cache_stride,
            text_padding=options.text_padding,
            quantization=options.quantization,
            weights_dtype=options.weights_dtype,
            on_bytes=on_bytes,
            convolutions=getattr(options, "convolutions", "dense"),
            reuse_changed=getattr(options, "reuse_changed", 0.0),
            controlnets=dict(getattr(options, "controlnets", [])),
            lora_dir=str(options.lora_dir) if getattr(options, "lora_dir", None) else None,
        )


def open_cache(folder: Path, limit: float) -> "Store":
    from instgenie.cache.disk import DiskTier
    from instgenie.cache.store import Store

    return Store(disk=DiskTier(folder, max_bytes=int(limit * 2**30)))

"""Types of arguments, and arguments that several commands share."""

import argparse
from pathlib import Path
from typing import get_args

from instgenie.types import CacheDtype, Convolutions, LoraUse, Quantization, TextPadding, WeightsDtype

CACHE_GIB = 20.0


def add_model(parser: argparse.ArgumentParser, has_size: bool = True) -> None:
    parser.add_argument(
        "--model",
        default="builtin",
        help="folder of a diffusers pipeline, hub id, builtin (the default), or dummy:NAME for random weights",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ...; default: CUDA if there is a device, else the CPU"
    )
    if has_size:
        parser.add_argument("--size", type=size, metavar="WxH", help="working size; default: the model's own")


def add_quantization(parser: argparse.ArgumentParser) -> None:
    about = "fp8: multiply in eight bits, on GPUs of compute capability 8.9 or more (default: the model's own dtype)"
    parser.add_argument("--quantization", choices=get_args(Quantization), help=about)


def add_weights_dtype(parser: argparse.ArgumentParser) -> None:
    about = "fp8: keep large weights in one byte each, on any device (default: the model's own dtype)"
    parser.add_argument("--weights-dtype", choices=get_args(WeightsDtype), help=about)


def add_cache(parser: argparse.ArgumentParser) -> None:
    about_folder = "cache folder; default: instgenie/templates in the user's cache folder"
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help=about_folder)
    about_gib = (
        f"size limit of the cache in GiB; the least recently used activations are evicted (default {CACHE_GIB:g})"
    )
    parser.add_argument("--cache-gib", type=gib, default=CACHE_GIB, metavar="N", help=about_gib)
    about_dtype = (
        "number format of cached activations: the model's own (model, the default), fp8 with half of "
        "the bytes of bfloat16, or int4 with less than a third"
    )
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), default="model", help=about_dtype)
    about_stride = "register every N-th step, which serves the steps around it (default 1)"
    parser.add_argument("--cache-stride", type=positive, default=1, metavar="N", help=about_stride)
    add_text_padding(parser)


def add_text_padding(parser: argparse.ArgumentParser) -> None:
    about = (
        "padding of prompts: computed at every step (the default), or reused: read from activations like unmasked "
        "tokens, so that only the tokens of the prompt are computed"
    )
    parser.add_argument("--text-padding", choices=get_args(TextPadding), default="computed", help=about)


def add_convolutions(parser: argparse.ArgumentParser) -> None:
    about = (
        "convolutions of a UNet: over whole pictures (dense, the default), over tiles (tiled), or over masked tiles "
        "alone where an edit reads activations (reused)"
    )
    parser.add_argument("--convolutions", choices=get_args(Convolutions), default="dense", help=about)


def add_reuse_changed(parser: argparse.ArgumentParser) -> None:
    about = (
        "do not compute steps whose predictions can be guessed from those before: the probability of a wrong guess "
        "from which a step is computed (default 0: all steps are)"
    )
    parser.add_argument("--reuse-changed", type=share, default=0.0, metavar="SHARE", help=about)


def box(text: str) -> tuple[int, int, int, int]:
    try:
        x, y, w, h = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not x,y,width,height in whole pixels") from None
    return x, y, w, h


def lora(text: str) -> LoraUse:
    """FILE, NAME, or either with a scale after a colon."""
    name, _, scale = text.rpartition(":")
    try:
        return LoraUse(name, float(scale)) if name else LoraUse(text)
    except ValueError:
        return LoraUse(text)  # a colon of its name


def control(text: str) -> dict[str, object]:
    """NAME=IMAGE, and maybe :SCALE and :START-END after the name, such as canny:0.8:0-0.5=canny."""
    problem = argparse.ArgumentTypeError(f"{text!r} is not NAME[:SCALE[:START-END]]=IMAGE")
    named, _, image = text.partition("=")
    name, *numbers = named.split(":")
    if not name or not image or len(numbers) > 2:
        raise problem
    try:
        scale = float(numbers[0]) if numbers else 1.0
        start, end = (float(part) for part in numbers[1].split("-")) if len(numbers) > 1 else (0.0, 1.0)
    except ValueError:
        raise problem from None
    return {"name": name, "image": image, "scale": scale, "start": start, "end": end}


def named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


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


def ratio(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1 or (value == 0 and text.strip("0.")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def number(text: str) -> float:
    """Parse a number; text that is not a number becomes 0, which callers refuse."""
    try:
        return float(text)
    except ValueError:
        return 0.0

"""Pipeline folders: finds them and checks them before anything is loaded. Knows files and the hub; no device.

Whatever is wrong with what a user names is a typed error that says what was given and what is expected.
"""

import json
import math
import re
import textwrap
from pathlib import Path

import diffusers
from safetensors import SafetensorError, safe_open

from instgenie.errors import ModelError

BUILTIN = Path(__file__).parent.parent / "builtin"
ONE_ENCODER = ("vae", "text_encoder", "tokenizer", "scheduler")
TWO_ENCODERS = (*ONE_ENCODER, "text_encoder_2", "tokenizer_2")
PIPELINES = {  # and the parts each must have
    "FluxPipeline": ("transformer", *TWO_ENCODERS),
    "FluxInpaintPipeline": ("transformer", *TWO_ENCODERS),
    "FluxFillPipeline": ("transformer", *TWO_ENCODERS),
    "StableDiffusionPipeline": ("unet", *ONE_ENCODER),
    "StableDiffusionInpaintPipeline": ("unet", *ONE_ENCODER),
    "StableDiffusionXLPipeline": ("unet", *TWO_ENCODERS),
    "StableDiffusionXLInpaintPipeline": ("unet", *TWO_ENCODERS),
}
WEIGHTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2")  # of these, the parts that have any


def find_folder(name: str) -> Path:
    folder = BUILTIN if name == "builtin" else Path(name)
    if folder.is_dir():
        return folder
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return download(name)
    raise ModelError(f"unknown model {name!r}: builtin, a pipeline folder or a hub id (owner/name) is expected")


def download(name: str) -> Path:
    try:
        return Path(diffusers.DiffusionPipeline.download(name, use_safetensors=True))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        reason = textwrap.shorten(str(error), 200)
        raise ModelError(f"model {name!r} is not a folder, and the hub did not give it: {reason}") from error


def check_index(folder: Path) -> str:
    """The pipeline's class, once its parts are all there."""
    path = folder / "model_index.json"
    if not path.is_file():
        raise ModelError(f"{folder} is not a pipeline folder: it holds no model_index.json")
    try:
        index = json.loads(path.read_text())
        pipeline = str(index["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is not a pipeline's index: JSON with a _class_name is expected") from error
    if pipeline not in PIPELINES:
        raise ModelError(f"{folder} holds a {pipeline}: {', '.join(PIPELINES)} are supported")
    parts = PIPELINES[pipeline]
    missing = [part for part in parts if not (folder / part).is_dir() or not (index.get(part) or [None])[0]]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}: a {pipeline} has {', '.join(parts)}")
    return pipeline


def count_parameters(folder: Path, pipeline: str) -> int:
    parts = [part for part in PIPELINES[pipeline] if part in WEIGHTS]
    return sum(count_in_file(path) for part in parts for path in weights_files(folder / part))


def weights_files(part: Path) -> list[Path]:
    files = sorted(part.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in part.iterdir() if path.suffix in {".bin", ".ckpt", ".pt", ".pth"})
        raise ModelError(f"{part} holds no safetensors weights: found {', '.join(others) or 'no weights at all'}")
    for index in part.glob("*.safetensors.index.json"):
        shards = read_shards(index)
        if missing := shards - {path.name for path in files}:
            raise ModelError(
                f"{part} lacks {', '.join(sorted(missing))}, of {len(shards)} weights files {index.name} names"
            )
    return files


def read_shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights files: JSON with a weight_map is expected") from error


def count_in_file(path: Path) -> int:
    try:
        with safe_open(path, framework="numpy") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(f"{path} ({size:,} bytes) is not a whole safetensors file: {error}") from error

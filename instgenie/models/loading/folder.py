"""Pipeline folders: finds them and checks them before anything is loaded. Knows files and the hub, no device.

Every fault in a model that a user names is a ModelError that says what was found and what is expected.
"""

import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import diffusers
from safetensors import SafetensorError, safe_open

from instgenie.errors import ModelError
from instgenie.machine.model_folders import model_folder
from instgenie.models.families import PIPELINES

BUILTIN_DEFAULTS: dict[str, Any] = {"own_size": 256, "steps": 28, "guidance": 3.5}
INDEX = "model_index.json"


def find_folder(name: str) -> Path:
    folder = model_folder(name)
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
        raise ModelError(f"model {name!r} is not a folder, and the hub did not deliver it: {reason}") from error


def check_index(folder: Path) -> str:
    """Return the class of the pipeline in the folder; raise if it is unsupported or lacks a part."""
    index = read_index(folder)
    pipeline = str(index["_class_name"])
    if pipeline not in PIPELINES:
        raise ModelError(f"{folder} holds a {pipeline}: {', '.join(PIPELINES)} are supported")
    parts = PIPELINES[pipeline].pipelines[pipeline]
    missing = [part for part in parts if not (folder / part).is_dir() or not (index.get(part) or [None])[0]]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}: a {pipeline} has {', '.join(parts)}")
    return pipeline


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise ModelError(f"{folder} is not a pipeline folder: it holds no {INDEX}")
    try:
        index = json.loads(path.read_text())
    except ValueError:
        index = None
    if not isinstance(index, dict) or "_class_name" not in index:
        raise ModelError(f"{path} is not a pipeline's index: JSON with a _class_name is expected")
    return index


def unused_parts(folder: Path, pipeline: str) -> list[str]:
    """Parts that the index names and no model uses, like a safety checker."""
    parts = [part for part, entry in read_index(folder).items() if isinstance(entry, list)]
    return [part for part in parts if part not in PIPELINES[pipeline].pipelines[pipeline]]


def count_parameters(folder: Path, pipeline: str) -> int:
    parts = PIPELINES[pipeline].weights_of(pipeline)
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

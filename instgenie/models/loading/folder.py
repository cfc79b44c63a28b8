"""Pipeline folders: finds them and checks them before anything is loaded. Knows files and the hub, no device.

Every fault in a model that a user names is a ModelError that says what was found and what is expected.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import diffusers

from instgenie.errors import ModelError
from instgenie.machine.model_folders import model_folder
from instgenie.models.families import PIPELINES
from instgenie.models.loading.stored import StoredTensor, read_stored

BUILTIN_DEFAULTS: dict[str, Any] = {"own_size": 256, "steps": 20, "guidance": 3.5, "removes": True}
INDEX = "model_index.json"
BASES = ("diffusion_pytorch_model", "model")  # names of weights files, of diffusers and transformers


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
    files = (path for part in parts for path in weights_files(folder / part))
    return sum(stored.num_values for path in files for stored in read_stored(path).values())


def stored_tensors(part: Path) -> dict[str, StoredTensor]:
    """The tensors of a part by their names in its files. Files of other variants beside them are left alone."""
    found = {path.name: path for path in weights_files(part)}
    for base in BASES:
        index = part / f"{base}.safetensors.index.json"
        names = sorted(read_shards(index)) if index.is_file() else [f"{base}.safetensors"]
        if found.keys() >= set(names):
            return {name: stored for one in names for name, stored in read_stored(found[one]).items()}
    expected = " or ".join(f"{base}.safetensors" for base in BASES)
    raise ModelError(f"{part} holds {', '.join(found)}: {expected}, or an index of either, is expected")


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

"""Writes a dummy as a pipeline's folder, as if it had been published: parts of published size with random weights."""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from instgenie.errors import ModelError
from instgenie.machine.stored_dtypes import STORED_DTYPES
from instgenie.models.loading.dummy import find_dummy, large_parts, make_parts
from instgenie.models.loading.folder import INDEX

SHARD_BYTES = 3 * 10**9
NUM_THREADS = 8
BASE = "diffusion_pytorch_model"
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def write_dummy(name: str, folder: Path, device: torch.device) -> int:
    """Draw weights on the device and write them in bfloat16. Returns the bytes of weights."""
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} is not empty: a dummy is written into a new folder")
    family, recipe = find_dummy(name)
    if unsaved := family.readers.keys() & set(family.pipelines[recipe.pipeline]):
        raise ModelError(f"{name!r} cannot be written: its {', '.join(sorted(unsaved))} has no form in files")
    parts = make_parts(recipe, family, device, torch.bfloat16)
    large = large_parts(recipe, family)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"_class_name": recipe.pipeline, "_diffusers_version": diffusers.__version__}
    index |= {part: [type(value).__module__.partition(".")[0], type(value).__name__] for part, value in parts.items()}
    (folder / INDEX).write_text(json.dumps(index | dict(recipe.options), indent=2) + "\n")
    for part, value in parts.items():
        if part not in large:
            value.save_pretrained(folder / part)
    num_bytes = 0
    for part in large:
        parts[part].save_config(folder / part)
        num_bytes += write_weights(parts[part], folder / part)
    return num_bytes


def write_weights(module: nn.Module, folder: Path) -> int:
    """Write the weights of a module as files of limited size, with their index."""
    tensors: Mapping[str, Tensor] = module.state_dict()
    shards = list(split(tensors))
    names = [f"{BASE}-{number:05}-of-{len(shards):05}.safetensors" for number, _ in enumerate(shards, 1)]
    if len(shards) == 1:
        names = [f"{BASE}.safetensors"]
    else:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index: dict[str, Any] = {"metadata": {"total_size": size_of(tensors)}, "weight_map": where}
        (folder / f"{BASE}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda name, shard: write_file(folder / name, shard), names, shards))
    return size_of(tensors)


def split(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and size_of(shard) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        first, end = end, end + tensor.nbytes
        fields[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            rest = memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())

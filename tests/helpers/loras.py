"""LoRA files for any model, in the formats of the trainers in use, and the same model with their weights merged."""

import copy
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.edits import close
from instgenie.adapters.applied import AppliedLoras, PatchableLayers, apply_loras
from instgenie.adapters.keys import NETWORK
from instgenie.adapters.layers import LayerShape
from instgenie.adapters.lora import Lora
from instgenie.adapters.tiers import LoraTiers
from instgenie.engine.copying import Copying
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.jobs.job import Job
from instgenie.kernels.grouped_linear import grouped_linear
from instgenie.models.layers import linear
from instgenie.models.model import Model
from instgenie.types import LoraUse

Pair = tuple[Tensor, Tensor]


def draw_pairs(shapes: Mapping[str, LayerShape], names: Iterable[str], rank: int, seed: int) -> dict[str, Pair]:
    """Random tensors for layers, large enough to change a result."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name in names:
        shape = shapes[name]
        inputs = (shape.inputs, *(shape.kernel or ()))
        down = torch.randn(rank, *inputs, generator=generator) * (torch.Size(inputs).numel() ** -0.5)
        up = torch.randn(shape.outputs, rank, *(() if shape.kernel is None else (1, 1)), generator=generator)
        pairs[name] = down, 0.5 * up * rank**-0.5
    return pairs


def save_lora(
    path: Path,
    model: Model,
    names: Iterable[str] | None = None,
    rank: int = 3,
    seed: int = 0,
    alpha: float | None = None,
    part: str = NETWORK,
    **extra: Tensor,
) -> Path:
    """Save a LoRA for layers of a model, by default all of its network, as PEFT and diffusers name them."""
    shapes = model.layer_table.shapes[part]
    prefix = model.network_name if part == NETWORK else part
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in draw_pairs(shapes, shapes if names is None else names, rank, seed).items():
        tensors[f"{prefix}.{name}.lora_A.weight"], tensors[f"{prefix}.{name}.lora_B.weight"] = down, up
        if alpha is not None:
            tensors[f"{prefix}.{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors | extra, path)
    return path


def load_lora(path: Path, model: Model) -> Lora:
    """Read a LoRA as a process does that applies all of it."""
    tiers = LoraTiers(model.layer_table, model.device, model.dtype, sys.maxsize, sys.maxsize)
    try:
        [(lora, _)] = tiers.fetch([LoraUse(path.stem, 1.0, str(path), path.stem)]).result()
    finally:
        tiers.close()
    return lora


def applied(model: Model, *loras: tuple[Path, float]) -> AppliedLoras:
    layers = PatchableLayers({NETWORK: model.network})
    return apply_loras(layers, [(load_lora(path, model), scale) for path, scale in loras])


def run_copying(model: Model, jobs: Sequence[Job], graphs: Graphs | None = None) -> list[Tensor]:
    """Final latents of jobs that start together, each with weights of its own, however few rows it has."""
    engine, jobs = Engine(model, graphs=graphs, copying=Copying(sys.maxsize)), [replace(job) for job in jobs]
    num_products = 0

    def count(*args: Any) -> Tensor:
        nonlocal num_products
        num_products += 1
        return grouped_linear(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "MIN_ROWS", 0)
        patch.setattr(linear, "grouped_linear", count)
        for job in jobs:
            engine.join(job)
        while engine.jobs:
            engine.step()
    assert num_products
    assert engine.copying.num_copied == len({job.loras for job in jobs if job.loras})
    return [job.latents for job in jobs]


def merged(model: Model, *loras: tuple[Path, float]) -> Model:
    """The model with W + scale * up @ down in the place of each weight: what diffusers computes after it has loaded and
    fused such LoRAs. PEFT is not needed for that."""
    parts: dict[str, Any] = {
        model.network_name if part == NETWORK else part: copy.deepcopy(module)
        for part, module in model.patchable.items()
    }
    for path, scale in loras:
        for (part, name), low in load_lora(path, model).layers.items():
            module = parts[model.network_name if part == NETWORK else part].get_submodule(name)
            add_to(module, scale * low.delta)
    return replace(model, **parts)


@torch.no_grad()
def add_to(module: nn.Module, delta: Tensor) -> None:
    weight = module.get_parameter("weight")
    weight.copy_(weight.float() + delta.view_as(weight))


def tolerance(model: Model) -> float:
    """How far results with products of low rank may be from those with merged weights. In float32 only the order of
    sums differs, and they end within a sixth of this. In bfloat16 merged weights are rounded as well, an error of the
    same size."""
    return close(model) if model.dtype == torch.float32 else 2 * close(model)


def write_header(path: Path, header: Mapping[str, object], data: bytes = b"") -> Path:
    """A safetensors file with any header."""
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path

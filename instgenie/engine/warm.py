"""Warming up: each part of the model runs once before a process says that it is ready, so that the first edit does not
wait for kernels to be compiled and libraries to be set up, and a part that cannot run is noticed at once.

On a CUDA device the parts run at the model's own size, because kernels are chosen by the sizes they work on. On a CPU a
small picture does.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
from torch import nn

from instgenie.adapters.applied import AppliedLoras, PatchableLayers
from instgenie.adapters.keys import NETWORK
from instgenie.cost.plan import DENSE
from instgenie.engine.copying import Copying
from instgenie.engine.finish import decode
from instgenie.engine.loop import Engine, free_memory
from instgenie.engine.prepare import prepare
from instgenie.engine.register import make_activations, name_key, observe_span, reuse
from instgenie.jobs.job import Job, Template
from instgenie.kernels.low_rank import (
    MIN_TILES,
    LowRank,
    LowRankLayers,
    LowRankRows,
    add_low_rank,
    make_slots,
    start_low_rank,
)
from instgenie.kernels.switch import runs_fused
from instgenie.machine.clock import now
from instgenie.machine.device_memory import is_out_of_memory
from instgenie.models.model import Model
from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import SIZE_MULTIPLE
from instgenie.pictures.samples import MIDDLE, mask_around, sample_picture
from instgenie.types import CacheDtype, Edit, PixelMask

NUM_STEPS = 2  # the second begins with what the first has loaded ahead
MASK_RATIO = 0.2
SMALL = 64  # pixels a side, on a CPU
LORA_RANK = 16

log = logging.getLogger(__name__)


@contextmanager
def room_or_not(model: Model) -> Iterator[None]:
    """Go on without warming up if memory runs out: edits of smaller pictures may fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        log.warning("not warmed up, for want of memory", extra={"reason": str(error).splitlines()[0]})
        free_memory(model.device)


def warm_up_preparing(model: Model) -> None:
    """Encode a picture and a prompt."""
    with room_or_not(model):
        prepare(sample_edit(model), model)
        now(model.device)


@torch.inference_mode()
def warm_up_steps(model: Model, cache_dtype: CacheDtype) -> None:
    """Register a template, and take steps that compute every token and steps that reuse activations. Needs the network
    alone: text is zeros."""
    with room_or_not(model):
        for one in sample_jobs(model, cache_dtype):
            engine = Engine(model)
            engine.join(one)
            while engine.jobs:
                engine.step()
        now(model.device)


@torch.inference_mode()
def warm_up_loras(model: Model, cache_dtype: CacheDtype, weights_bytes: int = 0) -> None:
    """Start layers with products of the usual ranks, for a few rows and for many, and add to one: kernels are compiled,
    or found as an earlier process left them. With bytes for weights of their own, take steps with these, too."""
    if weights_bytes:
        warm_up_copies(model, cache_dtype, weights_bytes)
    many = [] if model.device.type == "cpu" else [32, 64]  # rows of a tile
    with room_or_not(model):
        for num_rows, rank in product([16, *(MIN_TILES * one for one in many)], (16, 64)):
            rows = torch.zeros(num_rows, rank, device=model.device, dtype=model.dtype)
            low = LowRank(down=rows.new_zeros(rank, rank), up=rows.new_zeros(rank, rank), scale=1.0)
            layers = LowRankLayers([[low]])
            whose = LowRankRows(make_slots([layers], model.device), layers.rank_class, num_rows, None)
            add_low_rank(rows, torch.zeros_like(rows), whose, 0)
            if runs_fused(rows):
                for bounds in (None, rows.new_full((2,), num_rows, dtype=torch.int64)):
                    start_low_rank(rows, whose._replace(bounds=bounds), [0], [rank], None)
        now(model.device)


@torch.inference_mode()
def warm_up_copies(model: Model, cache_dtype: CacheDtype, max_bytes: int) -> None:
    """Take a step of two edits with weights of their own, dense and cached: their products have other kernels."""
    with room_or_not(model):
        numbers = PatchableLayers({NETWORK: model.network}).numbers
        linear = [layer for layer in numbers if type(layer) is nn.Linear]
        down = {layer: layer.weight.new_zeros(LORA_RANK, layer.in_features) for layer in linear}
        up = {layer: layer.weight.new_zeros(layer.out_features, LORA_RANK) for layer in linear}
        layers: dict[nn.Module, tuple[LowRank, ...]]
        layers = {layer: (LowRank(down[layer], up[layer], 1.0),) for layer in linear}
        for one in sample_jobs(model, cache_dtype):
            engine = Engine(model, copying=Copying(max_bytes))
            for _ in range(2):
                engine.join(replace(one, loras=AppliedLoras(layers, numbers)))
            engine.step()
        now(model.device)


@torch.inference_mode()
def warm_up_finishing(model: Model) -> None:
    """Decode latents."""
    with room_or_not(model):
        size = sample_size(model)
        grid = size[0] // model.patch, size[1] // model.patch
        decode([blank_latents(model, grid)], [sample_mask(model)], grid, model)


def sample_size(model: Model) -> tuple[int, int]:
    unit = math.lcm(model.size_multiple, SIZE_MULTIPLE)
    side = SMALL if model.device.type == "cpu" else max(model.own_size, SMALL)
    side = min(side, model.max_side or side)
    return unit * math.ceil(side / unit), unit * math.ceil(side / unit)


def sample_mask(model: Model) -> PixelMask:
    return mask_around(MIDDLE, sample_size(model), model.patch, MASK_RATIO)


def sample_edit(model: Model) -> Edit:
    size = sample_size(model)
    picture, mask = sample_picture(size), sample_mask(model)
    return Edit(picture, mask, "a flower", steps=NUM_STEPS, guidance=model.guidance, size=size, dense_steps=0)


def sample_jobs(model: Model, cache_dtype: CacheDtype) -> tuple[Job, Job]:
    """Two jobs of one edit: one computes every token, one reads a template, which is registered now."""
    edit = sample_edit(model)
    job, key = blank_job(edit, model), name_key("", "", edit, model, "kv", cache_dtype)
    activations = make_activations(key, observe_span(job, model, key, key.slots), model)
    return replace(job, plan=DENSE), reuse(job, activations)


def blank_latents(model: Model, grid: tuple[int, int]) -> torch.Tensor:
    num_channels = model.latent_channels * model.latents_per_token**2
    return torch.zeros(grid[0] * grid[1], num_channels, device=model.device)


def blank_job(edit: Edit, model: Model) -> Job:
    """A job of an edit whose picture and prompt are not encoded."""
    height, width = sample_size(model)
    grid = height // model.patch, width // model.patch
    clean = blank_latents(model, grid)
    masked = torch.tensor(token_mask(edit.mask, model.patch), device=model.device).reshape(-1, 1)
    pixels = torch.zeros(1, 1, height, width, device=model.device)
    num_branches = 2 if model.guidance_scale(edit) > 1 else 1
    return Job(
        edit=edit,
        grid=grid,
        template=Template(clean, clean),
        masked=masked,
        conditioning=model.beside(clean, pixels) if model.is_fill else clean[:, :0],
        branches=(model.blank_branch(grid, (grid,) if model.sees_picture else ()),) * num_branches,
        scale=model.guidance_scale(edit),
        keeps_norm=model.keeps_norm,
        schedule=model.schedule(edit, len(masked)),
        latents=clean,
        reference=clean if model.sees_picture else None,
    )

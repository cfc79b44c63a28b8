"""Edits of random pictures, runs of them through the engine, and how far apart two results may be."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor, nn

from instgenie.bench.stock import stock_pipeline
from instgenie.engine import prepare as preparing
from instgenie.engine.loop import Engine
from instgenie.jobs.job import Branch, Job
from instgenie.models.flux.model import is_flux
from instgenie.models.flux2.model import Flux2KleinModel
from instgenie.models.model import Model
from instgenie.models.qwen.model import QwenModel
from instgenie.types import Edit

ENCODINGS: WeakKeyDictionary[Model, preparing.Encodings] = WeakKeyDictionary()
CLOSE = 1e-4  # between two runs that compute the same in another order, in float32
BOXES = {  # masks at the rim of a picture, and one of a pixel
    "corner": (slice(-9, None), slice(-20, None)),
    "edge": (slice(20, 40), slice(0, 3)),
    "pixel": (slice(31, 32), slice(50, 51)),
}


def make_edit(
    prompt: str = "a red cat",
    size: tuple[int, int] = (32, 48),
    share: float = 0.4,
    picture_seed: int = 0,
    **fields: Any,
) -> Edit:
    """An edit of a random picture of the working size. A box in a corner, about `share` of the picture, is masked."""
    height, width = size
    picture = np.random.default_rng(picture_seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    mask = np.zeros(size, dtype=np.bool_)
    mask[: round(height * share**0.5), width - round(width * share**0.5) :] = True
    return Edit(picture, mask, prompt, **({"size": size, "steps": 4} | fields))


def prepare(edit: Edit, model: Model) -> Job:
    """A job as a worker prepares it: what the model has encoded before is found again, by any test."""
    return preparing.prepare(edit, model, encodings_of(model))


def encodings_of(model: Model) -> preparing.Encodings:
    return ENCODINGS.setdefault(model, preparing.Encodings())


MIX: list[dict[str, Any]] = [
    {"steps": 3, "share": 0.1, "seed": 1},
    {"steps": 5, "share": 0.9, "size": (64, 32), "prompt": "a blue dog on grass", "seed": 2, "true_guidance": 3.0},
    {"steps": 4, "share": 0.4, "picture_seed": 1, "guidance": 9.0},
    {"steps": 3, "share": 1.0, "size": (32, 32), "negative_prompt": "sky", "true_guidance": 1.5, "prompt": ""},
    {"steps": 6, "share": 0.3, "strength": 0.5, "seed": 3, "prompt": "flower", "masked_content": "surroundings"},
]


def mixed_edits() -> list[Edit]:
    return [make_edit(**fields) for fields in MIX]


def run(model: Model, given: Sequence[Edit | Job]) -> list[Tensor]:
    """Final latents of edits or jobs that start together; jobs are copied and stay at their step."""
    jobs = [prepare(one, model) if isinstance(one, Edit) else replace(one) for one in given]
    engine = Engine(model)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs]


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@cache
def close(model: Model) -> float:
    """The largest distance allowed between two runs that compute the same in another order.

    In float32 it is tiny. In bfloat16 every order rounds differently, and each step feeds the next, so the distance is
    measured: how far runs of mixed edits are from the same network in float32 over the same inputs. Two orders are each
    about that far from the truth, so they may be twice as far from each other.
    """
    if model.dtype == torch.float32:
        return CLOSE
    jobs = [prepare(edit, model) for edit in mixed_edits()]
    return 2 * max(map(apart, run(model, jobs), run(in_float32(model), [widened(job) for job in jobs])))


def in_float32(model: Model) -> Model:
    """The same network in float32. Timesteps are still rounded to bfloat16: that rounding does not depend on order."""
    network = copy.deepcopy(model.network).float()
    if is_flux(model):
        network.time_text_embed = RoundedTime(model.transformer.time_text_embed)
    if isinstance(model, QwenModel):
        network.time_text_embed.time_proj = RoundedTime(network.time_text_embed.time_proj, unit=1000)
    if isinstance(model, Flux2KleinModel):
        network.time_guidance_embed.time_proj = RoundedTime(network.time_guidance_embed.time_proj)
    return replace(model, **{model.network_name: network}, dtype=torch.float32)


class RoundedTime(nn.Module):
    def __init__(self, embed: nn.Module, unit: int = 1) -> None:
        """The unit is the largest timestep by the embedding's own, of 1000."""
        super().__init__()
        self.embed, self.unit = embed, unit

    def forward(self, timestep: Tensor, *others: Tensor) -> Tensor:
        rounded = (timestep * self.unit).bfloat16() / 1000 * (1000 // self.unit)
        embedded: Tensor = self.embed(rounded, *(other.bfloat16() for other in others))
        return embedded.bfloat16().float()


def widened(job: Job) -> Job:
    branches = [Branch(branch.text.float(), branch.pooled.float(), branch.rotary) for branch in job.branches]
    return replace(job, branches=tuple(branches))


def far(model: Model, times: int = 100) -> float:
    """The least distance between runs that compute different things. In bfloat16 rounding may hide a difference."""
    return times * CLOSE if model.dtype == torch.float32 else 0.0


def quiet_pipeline(model: Model) -> DiffusionPipeline:
    pipeline = stock_pipeline(model)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_arguments(edit: Edit) -> dict[str, Any]:
    """Arguments of any stock pipeline that computes this edit up to the final latents."""
    height, width = edit.picture.shape[:2]
    return {
        "prompt": edit.prompt,
        "image": Image.fromarray(edit.picture),
        "mask_image": Image.fromarray(edit.mask.astype(np.uint8) * 255),
        "height": height,
        "width": width,
        "num_inference_steps": edit.steps,
        "guidance_scale": edit.guidance,
        "strength": 1.0,
        "output_type": "latent",
    }

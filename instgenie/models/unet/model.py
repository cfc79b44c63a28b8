"""Stable Diffusion 1.5, 2.1 and XL, with four channels or nine: prompts, sizes and schedules. `unet.network` knows the
UNet.

UNets have no guidance embedding: `guidance` is the scale of classifier-free guidance, as in the stock pipelines, and a
value of 1 or less turns it off. A `true_guidance` above 1 means the same and takes precedence.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

from instgenie.adapters.applied import BatchLoras
from instgenie.cost.network import NetworkShape
from instgenie.errors import EditError
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Grid, Job
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.jobs.sampler import Schedule, ddim_schedule, euler_schedule
from instgenie.models.model import Keep, Model, pack_latents, tokenize
from instgenie.models.packed import PackedBatch
from instgenie.models.unet.batch import Cross, Positions, UnetBatch, pack
from instgenie.models.unet.controlnet import GuidedUnets
from instgenie.models.unet.lora_names import original_names
from instgenie.models.unet.network import (
    Encoded,
    Recorder,
    cross,
    describe,
    encode,
    find_positions,
    predict,
    transformers,
)
from instgenie.types import Edit

MAX_CAPTURED = 16
MAX_CROSSED = 4  # batches
# cuDNN's attention clears a word of memory before every call. With few branches this costs more than cuDNN gains, and
# several times more while activations are being copied to the device.
MAX_FLASH = 4  # branches
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CrossedPrompts:
    """K and V of the prompts of the batches that ran last."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.unet = unet
        self._found: OrderedDict[Hashable, tuple[Tensor, ...]] = OrderedDict()

    def __call__(self, branches: tuple[Branch, ...], loras: BatchLoras | None, token: Hashable) -> tuple[Tensor, ...]:
        """The token tells the LoRAs of the branches, merged or not, and holds none of their tensors."""
        key = branches, token
        if key not in self._found:
            self._found[key] = cross(self.unet, branches, loras)
        self._found.move_to_end(key)
        if len(self._found) > MAX_CROSSED:
            self._found.popitem(last=False)
        return self._found[key]


@dataclass(frozen=True, eq=False)
class UnetModel(Model):
    """Stable Diffusion 1.5 and 2.1: one text encoder."""

    family = "unet"
    network_name = "unet"
    is_convolutional = True
    latents_per_token = 1
    foreign_names = staticmethod(original_names)
    guided = GuidedUnets()
    needs_true_guidance = False
    whole_strength = 0.75  # what front ends for Stable Diffusion start with

    unet: UNet2DConditionModel
    scheduler: DDIMScheduler | EulerDiscreteScheduler

    @property
    def stock_pipeline_name(self) -> str:
        return "StableDiffusionInpaintPipeline"

    @property
    def stock_parts(self) -> dict[str, Any]:
        return self.parts | {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}

    @property
    def size_multiple(self) -> int:
        """Every level halves the sides of the picture."""
        return int(self.patch * 2**self.unet.num_upsamplers)

    @property
    def is_fill(self) -> bool:
        return bool(self.unet.config.in_channels != self.latent_channels)

    @property
    def run_lengths(self) -> tuple[int, ...]:
        return tuple(len(transformer.transformer_blocks) for transformer in transformers(self.unet))

    @property
    def max_captured(self) -> int:
        return MAX_CAPTURED

    def describe(self) -> NetworkShape:
        return replace(describe(self.unet), pads_lists=self.device.type == "cuda", dense_apart=True)

    def schedule(self, edit: Edit, num_tokens: int) -> Schedule:
        if edit.steps > (most := self.scheduler.config.num_train_timesteps):
            raise EditError(f"the number of steps is {edit.steps}: this model has at most {most}")
        if isinstance(self.scheduler, DDIMScheduler):
            return ddim_schedule(self.scheduler, edit.steps, edit.strength)
        return euler_schedule(self.scheduler, edit.steps, edit.strength)

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance if edit.true_guidance > 1 else edit.guidance

    @property
    def embeds_guidance(self) -> bool:
        return False

    def branches(self, edit: Edit, grid: Grid, references: Sequence[Grid] = ()) -> tuple[Branch, ...]:
        positive = self.branch(edit.prompt)
        return (positive, self.negative(edit.negative_prompt)) if self.guidance_scale(edit) > 1 else (positive,)

    def template_branches(
        self, grid: Grid, prompt: str, isolated: bool, references: Sequence[Grid] = ()
    ) -> tuple[Branch, ...]:
        if isolated:
            raise EditError("an isolated registration is for Flux: every transformer of a UNet reads the text")
        positive, negative = self.branch(prompt), self.negative("")
        return (positive,) if torch.equal(positive.text, negative.text) else (positive, negative)

    def negative(self, prompt: str) -> Branch:
        return self.branch(prompt)

    def blank_branch(self, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        text = torch.zeros(
            self.num_text_tokens, self.unet.config.cross_attention_dim, device=self.device, dtype=self.dtype
        )
        return Branch(text=text, pooled=text.new_zeros(self.num_pooled_channels), rotary=text[:0])

    @property
    def num_pooled_channels(self) -> int:
        return 0

    def branch(self, prompt: str) -> Branch:
        ids = tokenize(self.tokenizer, prompt, self.tokenizer.model_max_length).to(self.device)
        text = self.text_encoder(ids)[0][0].to(self.dtype)
        return Branch(text=text, pooled=text[0, :0], rotary=text[:0])

    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """The mask first, sampled at the first pixel under each latent, as the stock pipelines do."""
        mask = interpolate(pixels, scale_factor=1 / self.pixels_per_latent)
        return torch.cat([pack_latents(mask, self.latents_per_token), tokens], dim=1)

    @cached_property
    def positions(self) -> Positions:
        return find_positions(self.unet)

    @cached_property
    def cross(self) -> Cross:
        """K and V of the prompts of a batch, cached: the same jobs usually stay together for many steps."""
        return CrossedPrompts(self.unet)

    def passes(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs of one size, those that compute every token apart, so that few captured passes serve all batches."""
        groups: dict[tuple[tuple[int, int], bool], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.grid, any(job.present_plan)), []).append(job)
        return list(groups.values())

    def pack(self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS) -> UnetBatch:
        return pack(jobs, self.positions, self.cross, self.pixels_per_latent, pads, rows)

    def run(self, packed: PackedBatch) -> Tensor:
        assert isinstance(packed, UnetBatch)
        with attention(packed):
            return predict(self.unet, self.positions, packed)

    def begin(self, packed: PackedBatch) -> "UnetHalf":
        assert isinstance(packed, UnetBatch)
        with attention(packed):
            return UnetHalf(packed, encode(self.unet, self.positions, packed))

    def observe(self, jobs: Sequence[Job], kind: Kind, keep: Keep, with_text: bool = False) -> None:
        assert not with_text  # it does not flow
        predict(self.unet, self.positions, self.pack(jobs), Recorder(kind, keep))

    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        return torch.empty(len(jobs), 0, dtype=self.dtype, device=self.device)


def attention(packed: UnetBatch) -> AbstractContextManager[object]:
    """The kernels of attention that suit a batch."""
    prefers_flash = packed.sample.is_cuda and len(packed.sample) <= MAX_FLASH
    return sdpa_kernel(FLASH) if prefers_flash else nullcontext()


@dataclass(frozen=True, eq=False)
class UnetHalf:
    """A pass after its encoder."""

    packed: UnetBatch
    encoded: Encoded

    @property
    def places(self) -> Sequence[Tensor]:
        return self.encoded.places

    def end(self) -> Tensor:
        with attention(self.packed):
            return self.encoded.end()


@dataclass(frozen=True, eq=False)
class UnetXlModel(UnetModel):
    """Stable Diffusion XL: two text encoders side by side, a pooled embedding, and sizes."""

    text_encoder_2: CLIPTextModelWithProjection
    tokenizer_2: PreTrainedTokenizerBase
    empty_is_zero: bool  # embeddings of an empty negative prompt are zeros

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"text_encoder_2": self.text_encoder_2, "tokenizer_2": self.tokenizer_2}

    @property
    def stock_pipeline_name(self) -> str:
        return "StableDiffusionXLInpaintPipeline"

    @property
    def stock_parts(self) -> dict[str, Any]:
        return self.parts

    @property
    def num_pooled_channels(self) -> int:
        return int(self.text_encoder_2.config.projection_dim)

    def negative(self, prompt: str) -> Branch:
        branch = self.branch(prompt)
        if prompt or not self.empty_is_zero:
            return branch
        return Branch(torch.zeros_like(branch.text), torch.zeros_like(branch.pooled), branch.rotary)

    def branch(self, prompt: str) -> Branch:
        encoders = ((self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2))
        encoded = [
            encoder(tokenize(tokenizer, prompt, tokenizer.model_max_length).to(self.device), output_hidden_states=True)
            for tokenizer, encoder in encoders
        ]
        text = torch.cat([one.hidden_states[-2][0] for one in encoded], dim=1).to(self.dtype)
        return Branch(text=text, pooled=encoded[-1].text_embeds[0].to(self.dtype), rotary=text[:0])

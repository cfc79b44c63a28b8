"""Stable Diffusion 1.5, 2.1 and XL, with four channels or nine: prompts, sizes and schedules. `unet.passes` runs
the UNet.

UNets have no guidance embedding: `guidance` is the scale of classifier-free guidance, as in the stock pipelines, and a
value of 1 or less turns it off. A `true_guidance` above 1 means the same and takes precedence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

from instgenie.cost.network import NetworkShape
from instgenie.errors import EditError
from instgenie.jobs.job import Branch, Grid
from instgenie.jobs.sampler import Schedule, ddim_schedule, euler_schedule
from instgenie.models.model import NOTHING, Seen, pack_latents, tokenize
from instgenie.models.unet.controlnet import GuidedUnets
from instgenie.models.unet.lora_names import original_names
from instgenie.models.unet.network import describe, transformers
from instgenie.models.unet.passes import UnetPasses
from instgenie.types import Edit

MAX_CAPTURED = 16


@dataclass(frozen=True, eq=False)
class UnetModel(UnetPasses):
    """Stable Diffusion 1.5 and 2.1: one text encoder."""

    family = "unet"
    network_name = "unet"
    is_convolutional = True
    latents_per_token = 1
    foreign_names = staticmethod(original_names)
    guided = GuidedUnets()
    needs_true_guidance = False
    whole_strength = 0.75  # what front ends for Stable Diffusion start with

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
        shape = replace(describe(self.unet), pads_lists=self.device.type == "cuda", dense_apart=True)
        return replace(shape, convolutions=self.tiling.shapes)

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

    def branches(self, edit: Edit, grid: Grid, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        positive = self.branch(edit.prompt)
        return (positive, self.negative(edit.negative_prompt)) if self.guidance_scale(edit) > 1 else (positive,)

    def template_branches(self, grid: Grid, prompt: str, isolated: bool, seen: Seen = NOTHING) -> tuple[Branch, ...]:
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

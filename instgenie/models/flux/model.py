"""A Flux model: prompts and conditioning. `flux.network` knows the transformer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import pixel_unshuffle
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from instgenie.errors import ModelError
from instgenie.jobs.job import Branch, Grid, Job
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.models.flux.controlnet import GuidedFluxes
from instgenie.models.flux.lora_names import original_names
from instgenie.models.flux.network import FluxNetwork, embed_positions
from instgenie.models.joint.batch import JointBatch, pack
from instgenie.models.joint.model import JointModel
from instgenie.models.model import NOTHING, Model, Seen, count_tokens, pack_latents, tokenize
from instgenie.types import Edit

MAX_TEXT_TOKENS = 512  # the stock pipelines' limit; a tokenizer may have none


@dataclass(frozen=True, eq=False)
class FluxModel(JointModel):
    family = "flux"
    foreign_names = staticmethod(original_names)
    needs_true_guidance = True
    guided = GuidedFluxes()

    transformer: FluxTransformer2DModel
    text_encoder_2: T5EncoderModel
    tokenizer_2: PreTrainedTokenizerBase

    @cached_property
    def joint_network(self) -> FluxNetwork:
        return FluxNetwork(self.transformer)

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"text_encoder_2": self.text_encoder_2, "tokenizer_2": self.tokenizer_2}

    @property
    def stock_pipeline_name(self) -> str:
        return "FluxFillPipeline" if self.is_fill else "FluxInpaintPipeline"

    @property
    def stock_arguments(self) -> dict[str, Any]:
        strength = {} if self.is_fill else super().stock_arguments
        return strength | {"max_sequence_length": self.num_text_tokens}

    @property
    def is_fill(self) -> bool:
        return bool(self.transformer.config.in_channels != 4 * self.latent_channels)

    @property
    def num_text_tokens(self) -> int:
        return min(int(self.tokenizer_2.model_max_length), MAX_TEXT_TOKENS)

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.transformer.config.guidance_embeds)

    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        return embed_positions(self.transformer, num_text, grid, references)

    def branches(self, edit: Edit, grid: Grid, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        found = super().branches(edit, grid, seen)
        return found if edit.controls else tuple(replace(branch, words=None) for branch in found)

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        words = self.encode_sequence(prompt)
        sequence = self.joint_network.embed_prompt(words)
        num_prompt = count_tokens(self.tokenizer_2, prompt, self.num_text_tokens)
        rotary = self.rotary(len(sequence), grid, seen.grids)
        return Branch(sequence, self.encode_pooled(prompt), rotary, num_prompt, words)

    def encode_sequence(self, prompt: str) -> Tensor:  # [text tokens, text channels]
        ids = tokenize(self.tokenizer_2, prompt, self.num_text_tokens).to(self.device)
        sequence: Tensor = self.text_encoder_2(ids)[0][0]
        return sequence.to(self.dtype)

    def encode_pooled(self, prompt: str) -> Tensor:  # [pooled channels]
        ids = tokenize(self.tokenizer, prompt, self.tokenizer.model_max_length).to(self.device)
        pooled: Tensor = self.text_encoder(ids).pooler_output[0]
        return pooled.to(self.dtype)

    def pack_step(
        self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS, modulation: Tensor | None = None
    ) -> JointBatch:
        depth = len(self.transformer.transformer_blocks), len(self.transformer.single_transformer_blocks)
        return pack(jobs, pads, rows, modulation, depth=depth)

    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """The pixels of the mask under a latent become its channels, which are packed like latents."""
        return torch.cat([tokens, pack_latents(pixel_unshuffle(pixels, self.pixels_per_latent))], dim=1)


@dataclass(frozen=True, eq=False)
class FluxKontextModel(FluxModel):
    """FLUX.1 Kontext: the network sees the picture as a second set of image tokens, or another picture in its place.
    These tokens are the same at every step."""

    sees_picture = True
    max_references = 1
    whole_strength = 1.0  # it sees the picture, so its edit may begin with noise

    @property
    def stock_pipeline_name(self) -> str:
        return "FluxKontextInpaintPipeline"

    @property
    def stock_arguments(self) -> dict[str, Any]:
        return super().stock_arguments | {"_auto_resize": False}


def is_flux(model: Model) -> TypeGuard[FluxModel]:
    return isinstance(model, FluxModel)


def as_flux(model: Model) -> FluxModel:
    """The same model, for code that walks the blocks of a Flux transformer."""
    if not is_flux(model):
        raise ModelError(f"the model {model.name!r} is of the family {model.family!r}: this needs a Flux model")
    return model

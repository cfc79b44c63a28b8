"""A Flux model: prompts, sizes and schedules. `flux.network` knows the transformer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import pixel_unshuffle
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from instgenie.cost.network import NetworkShape
from instgenie.errors import ModelError
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.jobs.sampler import FlowSchedule, flow_schedule, flow_strength
from instgenie.models.flux.batch import FluxBatch, pack
from instgenie.models.flux.controlnet import GuidedFluxes
from instgenie.models.flux.lora_names import original_names
from instgenie.models.flux.modulation import ModulationTables
from instgenie.models.flux.network import (
    describe,
    embed_positions,
    embed_prompt,
    embed_time,
    num_blocks,
    observe,
    velocity,
)
from instgenie.models.model import Keep, Model, count_tokens, pack_latents, tokenize
from instgenie.models.packed import PackedBatch
from instgenie.types import Edit

CAPTURED_AREA = 2 * 3072**2  # branches times squared width; below it, launching kernels takes longer than running them
WHOLE_SIGMA = 0.9  # noise level at which a whole picture starts: less leaves it as it is, more leaves little of it
MAX_TEXT_TOKENS = 512  # the stock pipelines' limit; a tokenizer may have none


@dataclass(frozen=True, eq=False)
class FluxModel(Model):
    family = "flux"
    network_name = "transformer"
    is_convolutional = False
    latents_per_token = 2
    foreign_names = staticmethod(original_names)
    needs_true_guidance = True
    text_flows = True
    guided = GuidedFluxes()

    transformer: FluxTransformer2DModel
    text_encoder_2: T5EncoderModel
    tokenizer_2: PreTrainedTokenizerBase

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
    def size_multiple(self) -> int:
        return self.patch

    @property
    def is_fill(self) -> bool:
        return bool(self.transformer.config.in_channels != 4 * self.latent_channels)

    @property
    def run_lengths(self) -> tuple[int, ...]:
        return (num_blocks(self.transformer),)

    @property
    def max_captured(self) -> int:
        return max(CAPTURED_AREA // int(self.transformer.inner_dim) ** 2, 1)

    @property
    def num_text_tokens(self) -> int:
        return min(int(self.tokenizer_2.model_max_length), MAX_TEXT_TOKENS)

    def describe(self) -> NetworkShape:
        return describe(self.transformer)

    def schedule(self, edit: Edit, num_tokens: int) -> FlowSchedule:
        return flow_schedule(self.scheduler, edit.steps, num_tokens, edit.strength)

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.transformer.config.guidance_embeds)

    @property
    def whole_strength(self) -> float:
        return flow_strength(self.scheduler, (self.own_size // self.patch) ** 2, WHOLE_SIGMA)

    def branches(self, edit: Edit, grid: tuple[int, int]) -> tuple[Branch, ...]:
        prompts = (edit.prompt, edit.negative_prompt) if self.guidance_scale(edit) > 1 else (edit.prompt,)
        return tuple(self.branch(prompt, grid, keeps_words=bool(edit.controls)) for prompt in prompts)

    def template_branches(self, grid: tuple[int, int], prompt: str, isolated: bool) -> tuple[Branch, ...]:
        branch = self.branch(prompt, grid)
        num_text = len(branch.text)
        without_text = replace(branch, text=branch.text[:0], rotary=branch.rotary[num_text:], num_prompt=0)
        return (without_text,) if isolated else (branch,)

    def blank_branch(self, grid: tuple[int, int]) -> Branch:
        text = torch.zeros(self.num_text_tokens, self.transformer.inner_dim, device=self.device, dtype=self.dtype)
        pooled = text.new_zeros(self.transformer.config.pooled_projection_dim)
        return Branch(text, pooled, embed_positions(self.transformer, len(text), grid))

    def branch(self, prompt: str, grid: tuple[int, int], keeps_words: bool = False) -> Branch:
        words = self.encode_sequence(prompt)
        sequence = embed_prompt(self.transformer, words)
        rotary = embed_positions(self.transformer, len(sequence), grid)
        num_prompt = count_tokens(self.tokenizer_2, prompt, self.num_text_tokens)
        return Branch(sequence, self.encode_pooled(prompt), rotary, num_prompt, words if keeps_words else None)

    def encode_sequence(self, prompt: str) -> Tensor:  # [text tokens, text channels]
        ids = tokenize(self.tokenizer_2, prompt, self.num_text_tokens).to(self.device)
        sequence: Tensor = self.text_encoder_2(ids)[0][0]
        return sequence.to(self.dtype)

    def encode_pooled(self, prompt: str) -> Tensor:  # [pooled channels]
        ids = tokenize(self.tokenizer, prompt, self.tokenizer.model_max_length).to(self.device)
        pooled: Tensor = self.text_encoder(ids).pooler_output[0]
        return pooled.to(self.dtype)

    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """The pixels of the mask under a latent become its channels, which are packed like latents."""
        return torch.cat([tokens, pack_latents(pixel_unshuffle(pixels, self.pixels_per_latent))], dim=1)

    @cached_property
    def modulation(self) -> ModulationTables:
        return ModulationTables(self.transformer)

    def pack(self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS) -> FluxBatch:
        depth = len(self.transformer.transformer_blocks), len(self.transformer.single_transformer_blocks)
        return pack(jobs, pads, rows, self.modulation.at(jobs), depth)

    def run(self, packed: PackedBatch) -> Tensor:
        assert isinstance(packed, FluxBatch)
        return velocity(self.transformer, packed)

    def observe(self, jobs: Sequence[Job], kind: Kind, keep: Keep, with_text: bool = False) -> None:
        for seen in observe(self.transformer, pack(jobs), kind, with_text):
            keep(seen.unflatten(1, (len(jobs), -1)).transpose(0, 1))

    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        return embed_time(self.transformer, pack(jobs))


def is_flux(model: Model) -> TypeGuard[FluxModel]:
    return isinstance(model, FluxModel)


def as_flux(model: Model) -> FluxModel:
    """The same model, for code that walks the blocks of a Flux transformer."""
    if not is_flux(model):
        raise ModelError(f"the model {model.name!r} is of the family {model.family!r}: this needs a Flux model")
    return model

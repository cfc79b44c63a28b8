"""FLUX.2 klein: prompts, positions and schedules. `flux2.network` knows the transformer.

The network sees the picture as a second set of image tokens, and references as further sets after it. It has no
guidance embedding: `guidance` is the scale of classifier-free guidance, as in the stock pipelines. Distilled models run
without it; a `true_guidance` above 1 turns it on for any.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import Tensor
from transformers import Qwen3ForCausalLM

from instgenie.jobs.job import Branch, Grid
from instgenie.jobs.sampler import FlowSchedule, flow_schedule
from instgenie.models.flux2.lora_names import original_names
from instgenie.models.flux2.network import Flux2Network, embed_positions
from instgenie.models.joint.model import JointModel
from instgenie.models.model import NOTHING, Seen
from instgenie.types import Edit

MAX_TEXT_TOKENS = 512  # the stock pipelines' limit
MOST_SHIFTED = 4300  # tokens of a picture whose shift depends on the number of steps
TEXT_LAYERS = (9, 18, 27)  # hidden states of the text encoder that lie side by side in a token of the text


@dataclass(frozen=True, eq=False)
class Flux2KleinModel(JointModel):
    """A base model, with classifier-free guidance."""

    family = "flux2"
    foreign_names = staticmethod(original_names)
    needs_true_guidance = False
    sees_picture = True
    max_references = 3
    references_replace = False
    is_distilled = False
    whole_strength = 1.0  # it sees the picture, so its edit may begin with noise

    vae: AutoencoderKLFlux2
    transformer: Flux2Transformer2DModel
    text_encoder: Qwen3ForCausalLM

    @cached_property
    def joint_network(self) -> Flux2Network:
        return Flux2Network(self.transformer)

    @property
    def stock_pipeline_name(self) -> str:
        return "Flux2KleinInpaintPipeline"

    @property
    def stock_reference_pipeline_name(self) -> str:
        return "Flux2KleinKVPipeline"

    @property
    def stock_parts(self) -> dict[str, Any]:
        return super().stock_parts | {"is_distilled": self.is_distilled}

    @property
    def stock_arguments(self) -> dict[str, Any]:
        return super().stock_arguments | {"max_sequence_length": self.num_text_tokens}

    @property
    def num_text_tokens(self) -> int:
        return min(int(self.tokenizer.model_max_length), MAX_TEXT_TOKENS)

    @property
    def num_pooled(self) -> int:
        return 0

    @property
    def latent_statistics(self) -> tuple[Tensor, Tensor]:
        """Means and deviations of a token's channels, each [channels]."""
        norm = self.vae.bn
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        return mean.float(), (variance.float() + self.vae.config.batch_norm_eps).sqrt()

    def normalized(self, tokens: Tensor) -> Tensor:
        mean, deviation = self.latent_statistics
        return (tokens - mean) / deviation

    def denormalized(self, tokens: Tensor) -> Tensor:
        mean, deviation = self.latent_statistics
        return tokens * deviation + mean

    def schedule(self, edit: Edit, num_tokens: int) -> FlowSchedule:
        """The shift depends on the number of steps too."""
        shift = find_shift(num_tokens, edit.steps)
        return flow_schedule(self.scheduler, edit.steps, num_tokens, edit.strength, shift=shift)

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance if edit.true_guidance > 1 else edit.guidance

    @property
    def embeds_guidance(self) -> bool:
        return False

    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        return embed_positions(self.transformer, num_text, grid, references)

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        """The prompt is what a user says to a language model, whose thoughts are empty. Its padding has embeddings of
        its own, and flows with it."""
        said = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        found = self.tokenizer(
            said, return_tensors="pt", padding="max_length", truncation=True, max_length=self.num_text_tokens
        )
        words = self.encode_sequence(found.input_ids, found.attention_mask)
        comes_first = self.tokenizer.padding_side == "right"
        return Branch(
            text=self.joint_network.embed_prompt(words),
            pooled=words.new_empty(0),
            rotary=self.rotary(len(words), grid, seen.grids),
            num_prompt=int(found.attention_mask.sum()) if comes_first else None,
        )

    def encode_sequence(self, ids: Tensor, is_prompt: Tensor) -> Tensor:  # [text tokens, text channels]
        """The language model runs up to its last block; it says nothing."""
        seen = self.text_encoder.model(
            input_ids=ids.to(self.device),
            attention_mask=is_prompt.to(self.device),
            output_hidden_states=True,
            use_cache=False,
        )
        return torch.cat([seen.hidden_states[layer][0] for layer in TEXT_LAYERS], dim=1).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Flux2DistilledModel(Flux2KleinModel):
    """A model of few steps, trained to need no guidance."""

    needs_true_guidance = True
    is_distilled = True

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance


def find_shift(num_tokens: int, steps: int) -> float:
    """The stock pipelines' shift: lines over the number of tokens at 10 steps and at 200, and a line between both over
    the number of steps. Large pictures have that of 200 steps at any number."""
    few, many = 8.73809524e-05 * num_tokens + 1.89833333, 0.00016927 * num_tokens + 0.45666666
    return many if num_tokens > MOST_SHIFTED else many + (many - few) / 190 * (steps - 200)

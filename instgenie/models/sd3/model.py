"""Stable Diffusion 3 and 3.5: prompts, positions and schedules. `sd3.network` knows the transformer.

There is no guidance embedding: `guidance` is the scale of classifier-free guidance, as in the stock pipelines, and a
value of 1 or less turns it off. A `true_guidance` above 1 means the same and takes precedence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel

from instgenie.jobs.job import Branch, Grid, Job
from instgenie.jobs.rows import OWN_ROWS, StepRows
from instgenie.jobs.sampler import FlowSchedule, flow_schedule
from instgenie.models.joint.batch import JointBatch, pack
from instgenie.models.joint.model import JointModel
from instgenie.models.model import NOTHING, Seen, count_tokens, tokenize
from instgenie.models.sd3.lora_names import original_names
from instgenie.models.sd3.network import Sd3Network, find_positions
from instgenie.types import Edit

MAX_T5_TOKENS = 256  # of the stock pipelines
NUM_GRIDS = 64  # whose positions are kept on the device


@dataclass(frozen=True, eq=False)
class Sd3Model(JointModel):
    family = "sd3"
    foreign_names = staticmethod(original_names)
    needs_true_guidance = False

    transformer: SD3Transformer2DModel
    text_encoder: CLIPTextModelWithProjection
    text_encoder_2: CLIPTextModelWithProjection
    tokenizer_2: PreTrainedTokenizerBase
    text_encoder_3: T5EncoderModel
    tokenizer_3: PreTrainedTokenizerBase

    @cached_property
    def joint_network(self) -> Sd3Network:
        return Sd3Network(self.transformer)

    @property
    def parts(self) -> dict[str, Any]:
        names = ("text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
        return super().parts | {name: getattr(self, name) for name in names}

    @property
    def stock_pipeline_name(self) -> str:
        return "StableDiffusion3InpaintPipeline"

    @property
    def stock_arguments(self) -> dict[str, Any]:
        return super().stock_arguments | {"max_sequence_length": self.num_t5_tokens}

    @property
    def max_side(self) -> int:
        return int(self.transformer.config.pos_embed_max_size) * self.patch

    @property
    def num_clip_tokens(self) -> int:
        return int(self.tokenizer.model_max_length)

    @property
    def num_t5_tokens(self) -> int:
        return min(int(self.tokenizer_3.model_max_length), MAX_T5_TOKENS)

    @property
    def num_text_tokens(self) -> int:
        return self.num_clip_tokens + self.num_t5_tokens

    def schedule(self, edit: Edit, num_tokens: int) -> FlowSchedule:
        return flow_schedule(self.scheduler, edit.steps, num_tokens, edit.strength, own_spacing=True)

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance if edit.true_guidance > 1 else edit.guidance

    @property
    def embeds_guidance(self) -> bool:
        return False

    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        return torch.empty(num_text + grid[0] * grid[1], 0, dtype=torch.complex64, device=self.device)

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        """The tokens of all encoders take turns, so that those of the prompt come first and padding follows."""
        encoders = ((self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2))
        encoded = [
            encoder(tokenize(tokenizer, prompt, self.num_clip_tokens).to(self.device), output_hidden_states=True)
            for tokenizer, encoder in encoders
        ]
        clip = torch.cat([one.hidden_states[-2][0] for one in encoded], dim=1).to(self.dtype)
        ids = tokenize(self.tokenizer_3, prompt, self.num_t5_tokens).to(self.device)
        t5 = self.text_encoder_3(ids)[0][0].to(self.dtype)
        order, num_prompt = take_turns(
            (len(clip), max(count_tokens(tokenizer, prompt, len(clip)) for tokenizer, _ in encoders)),
            (len(t5), count_tokens(self.tokenizer_3, prompt, len(t5))),
        )
        text = torch.cat([F.pad(clip, (0, t5.shape[1] - clip.shape[1])), t5])[order.to(self.device)]
        pooled = torch.cat([one.text_embeds[0] for one in encoded]).to(self.dtype)
        return Branch(self.joint_network.embed_prompt(text), pooled, self.rotary(len(text), grid), num_prompt)

    @cached_property
    def positions(self) -> Callable[[Grid], Tensor]:
        """The positions of the tokens of a grid, on the device."""
        return lru_cache(maxsize=NUM_GRIDS)(lambda grid: find_positions(self.transformer, grid, self.device))

    def pack_step(
        self, jobs: Sequence[Job], pads: bool = False, rows: StepRows = OWN_ROWS, modulation: Tensor | None = None
    ) -> JointBatch:
        return pack(jobs, pads, rows, modulation, self.positions)


def take_turns(first: tuple[int, int], second: tuple[int, int]) -> tuple[Tensor, int]:
    """Let the tokens of two sequences alternate. Each is given as (number of tokens, number of them that are the
    prompt's). Return the order of both, and how many tokens hold all of the prompts."""
    (num_first, prompt_first), (num_second, prompt_second) = first, second
    turns = torch.cat([2 * torch.arange(num_first), 2 * torch.arange(num_second) + 1])
    order = turns.argsort()
    last = turns.new_tensor([2 * prompt_first - 2, 2 * prompt_second - 1]).max()
    return order, int((turns <= last).sum())

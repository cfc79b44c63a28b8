"""Z-Image: prompts, positions and guidance. `zimage.network` knows the transformer.

There is no guidance embedding. `guidance` is that of the stock pipelines, which count it from 0: the scale of
classifier-free guidance is one more, and 0 turns it off. A `true_guidance` above 1 is the scale itself and takes
precedence. The stock pipelines' normalisation and truncation of guidance are off, as they are there by default.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor
from transformers import PreTrainedModel

from instgenie.jobs.job import Branch, Grid
from instgenie.models.joint.model import JointModel
from instgenie.models.model import NOTHING, Seen
from instgenie.models.zimage.lora_names import original_names
from instgenie.models.zimage.network import MULTIPLE, ZImageNetwork, embed_positions, num_missing
from instgenie.types import Edit

MAX_TEXT_TOKENS = 512  # of the stock pipelines
USUAL_TEXT_TOKENS = 2 * MULTIPLE  # of a prompt of a sentence or two, with the words that the chat puts around it


@dataclass(frozen=True, eq=False)
class ZImageModel(JointModel):
    family = "zimage"
    foreign_names = staticmethod(original_names)
    needs_true_guidance = False

    transformer: ZImageTransformer2DModel
    text_encoder: PreTrainedModel

    @cached_property
    def joint_network(self) -> ZImageNetwork:
        return ZImageNetwork(self.transformer)

    @property
    def stock_pipeline_name(self) -> str:
        return "ZImageInpaintPipeline"

    @property
    def stock_arguments(self) -> dict[str, Any]:
        return super().stock_arguments | {"max_sequence_length": self.max_text_tokens}

    @property
    def width(self) -> int:
        return int(self.transformer.dim)

    @property
    def max_side(self) -> int:
        return int(min(self.transformer.axes_lens[1:])) * self.patch

    @property
    def max_text_tokens(self) -> int:
        """Tokens of a prompt, without those that make their number a multiple."""
        return min(int(self.tokenizer.model_max_length), MAX_TEXT_TOKENS)

    @property
    def num_text_tokens(self) -> int:
        """Tokens of a prompt that is not known yet. Prompts have as many as they need, in multiples."""
        return min(USUAL_TEXT_TOKENS, self.max_text_tokens + num_missing(self.max_text_tokens))

    @property
    def num_flowing_text(self) -> int:
        """None are worth keeping: a prompt has fewer tokens of padding than a multiple."""
        return 0

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance if edit.true_guidance > 1 else 1 + edit.guidance

    @property
    def embeds_guidance(self) -> bool:
        return False

    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        """Between text and image lie the rows that the image misses."""
        return embed_positions(self.transformer, num_text, grid).to(self.device)

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        return self.make_branch(self.joint_network.embed_prompt(self.encode(prompt)), grid)

    def make_branch(self, text: Tensor, grid: Grid) -> Branch:
        num_rows = num_missing(grid[0] * grid[1])
        missing = self.transformer.x_pad_token.expand(num_rows, -1)
        return Branch(torch.cat([text, missing]), text.new_empty(0), self.rotary(len(text), grid))

    def template_branches(self, grid: Grid, prompt: str, isolated: bool, seen: Seen = NOTHING) -> tuple[Branch, ...]:
        """Without text, the rows that the image misses lie where they do for the shortest one."""
        if not isolated:
            return (self.branch(prompt, grid, seen),)
        branch = self.make_branch(self.transformer.x_pad_token.expand(MULTIPLE, -1), grid)
        return (Branch(branch.text[MULTIPLE:], branch.pooled, branch.rotary[MULTIPLE:]),)

    def blank_branch(self, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        num_text = self.num_text_tokens
        num_rows = num_text + num_missing(grid[0] * grid[1])
        text = torch.zeros(num_rows, self.width, device=self.device, dtype=self.dtype)
        return Branch(text, text.new_empty(0), self.rotary(num_text, grid))

    def encode(self, prompt: str) -> Tensor:  # [prompt's tokens, text channels]
        """Encode what a user says in a chat. Padding would make no difference: no token sees those after it."""
        chat = [{"role": "user", "content": prompt}]
        said = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        ids = self.tokenizer(said, max_length=self.max_text_tokens, truncation=True, return_tensors="pt").input_ids
        layers = self.text_encoder(input_ids=ids.to(self.device), output_hidden_states=True).hidden_states
        encoded: Tensor = layers[-2][0]
        return encoded.to(self.dtype)

"""Qwen-Image: prompts, positions and guidance. `qwen.network` knows the transformer.

A text has no padding: it is as long as its prompt. There is no guidance embedding: `guidance` is the scale of
classifier-free guidance, whose result has the length of the prompt's own prediction, token by token. A value of 1 or
less turns it off; a `true_guidance` above 1 means the same and takes precedence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from instgenie.adapters.layers import Alias
from instgenie.jobs.job import Branch, Grid
from instgenie.models.joint.model import JointModel
from instgenie.models.qwen.network import QwenNetwork
from instgenie.types import Edit

MAX_TEXT_TOKENS = 512  # of the stock pipelines
USUAL_TEXT_TOKENS = 32  # of a prompt, for prices and captures: texts are not padded
MOST_READ = 1024  # tokens of a prompt that the language model reads
NUM_DROPPED, DESCRIBE = (
    34,
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
)


def no_other_names(_: Any) -> dict[str, Alias]:
    """The model's own code names its layers as diffusers does."""
    return {}


@dataclass(frozen=True, eq=False)
class QwenModel(JointModel):
    family = "qwen"
    foreign_names = staticmethod(no_other_names)
    needs_true_guidance = False
    keeps_norm = True

    vae: AutoencoderKLQwenImage
    transformer: QwenImageTransformer2DModel
    text_encoder: Qwen2_5_VLForConditionalGeneration

    @cached_property
    def joint_network(self) -> QwenNetwork:
        return QwenNetwork(self.transformer)

    @property
    def stock_pipeline_name(self) -> str:
        return "QwenImageInpaintPipeline"

    def stock_guidance(self, edits: Sequence[Edit]) -> dict[str, Any]:
        return {
            "true_cfg_scale": edits[0].guidance,
            "negative_prompt": [edit.negative_prompt for edit in edits],
        }

    @property
    def num_text_tokens(self) -> int:
        return USUAL_TEXT_TOKENS

    @property
    def num_flowing_text(self) -> int:
        return 0  # there is no padding to keep

    @property
    def num_pooled(self) -> int:
        return 0

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.z_dim)

    @property
    def pixels_per_latent(self) -> int:
        return int(2 ** len(self.vae.config.temperal_downsample))

    @property
    def latent_statistics(self) -> tuple[Tensor, Tensor]:
        """Means and deviations of a token's channels, each [channels]."""
        config, side = self.vae.config, self.latents_per_token
        found = torch.tensor([config.latents_mean, config.latents_std], device=self.device)
        mean, deviation = found.repeat_interleave(side * side, dim=1)
        return mean, deviation

    def normalized(self, tokens: Tensor) -> Tensor:
        mean, deviation = self.latent_statistics
        return (tokens - mean) / deviation

    def denormalized(self, tokens: Tensor) -> Tensor:
        mean, deviation = self.latent_statistics
        return tokens * deviation + mean

    def guidance_scale(self, edit: Edit) -> float:
        return edit.true_guidance if edit.true_guidance > 1 else edit.guidance

    @property
    def embeds_guidance(self) -> bool:
        return False

    @cached_property
    def positions(self) -> QwenEmbedRope:
        """Its tables are no weights, so a network without weights has none."""
        return QwenEmbedRope(theta=10000, axes_dim=list(self.transformer.config.axes_dims_rope), scale_rope=True)

    def rotary(self, num_text: int, grid: Grid, references: Sequence[Grid] = ()) -> Tensor:
        shapes = [(1, *one) for one in (grid, *references)]
        image, text = self.positions([shapes], device=self.device, max_txt_seq_len=num_text)
        return torch.cat([text, image])

    def branch(self, prompt: str, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        text = self.joint_network.embed_prompt(self.read_prompt(prompt))
        return Branch(text, text.new_empty(0), self.rotary(len(text), grid, references))

    def read_prompt(self, prompt: str) -> Tensor:  # [text tokens, text channels]
        """The last hidden states of the language model, without those of its instructions."""
        found = self.tokenizer(
            [DESCRIBE.format(prompt)], max_length=MOST_READ + NUM_DROPPED, truncation=True, return_tensors="pt"
        ).to(self.device)
        seen = self.text_encoder.model(
            input_ids=found.input_ids, attention_mask=found.attention_mask, output_hidden_states=True, use_cache=False
        )
        last: Tensor = seen.hidden_states[-1][0]
        return last[NUM_DROPPED : NUM_DROPPED + MAX_TEXT_TOKENS].to(self.dtype)

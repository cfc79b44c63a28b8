"""Qwen-Image and Qwen-Image-Edit: prompts, positions and guidance. `qwen.network` knows the transformer.

A text has no padding: it is as long as its prompt. There is no guidance embedding: `guidance` is the scale of
classifier-free guidance, whose result has the length of the prompt's own prediction, token by token. A value of 1 or
less turns it off; a `true_guidance` above 1 means the same and takes precedence.

A model that edits sees the picture twice: as a second set of image tokens, and as words of the prompt. These words come
before the instruction, and a word of the language model sees none that follow it, so they are the same for every
instruction. They are most of the text. A branch has them last, and activations keep their rows beside those of the
image.
"""

import math
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
from instgenie.models.model import NOTHING, Seen
from instgenie.models.qwen.network import QwenNetwork
from instgenie.models.qwen.vision import PICTURE, PictureReader, VisionProcessor, spread_pictures
from instgenie.pictures.resizing import resize_picture
from instgenie.types import Edit, Pixels

MAX_TEXT_TOKENS = 512  # of the stock pipelines
USUAL_TEXT_TOKENS = 32  # of a prompt, for prices and captures: texts are not padded
MOST_READ = 1024  # tokens of a prompt that the language model reads
NUM_DROPPED, DESCRIBE = (
    34,
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
)
NUM_DROPPED_EDIT, INSTRUCT = (
    64,
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
)
SHOW = f"<|vision_start|>{PICTURE}<|vision_end|>"
READ_SIDE = 384  # of the square whose area each of several pictures has for the language model


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

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        text = self.joint_network.embed_prompt(self.read_prompt(prompt))
        return Branch(text, text.new_empty(0), self.rotary(len(text), grid, seen.grids))

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


@dataclass(frozen=True, eq=False)
class QwenEditModel(QwenModel):
    """Qwen-Image-Edit: the network sees the picture, and the language model reads it with the instruction."""

    sees_picture = True
    reads_pictures = True
    stock_batches = False
    whole_strength = 1.0  # it sees the picture, so its edit may begin with noise

    processor: PictureReader

    @property
    def stock_pipeline_name(self) -> str:
        return "QwenImageEditInpaintPipeline"

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"processor": self.processor}

    @property
    def stock_parts(self) -> dict[str, Any]:
        return super().stock_parts | {"processor": VisionProcessor(self.tokenizer, self.processor)}

    @property
    def num_text_tokens(self) -> int:
        side = self.own_size // self.patch
        return USUAL_TEXT_TOKENS + self.num_facts([(side, side)])

    def num_kept_text(self, references: Sequence[Grid], keeps_text: bool) -> int:
        return self.num_facts(references)

    def num_facts(self, references: Sequence[Grid]) -> int:
        """Tokens of a text up to the last word of a picture."""
        if not references:
            return 0
        nums = [self.processor.num_words(*self.read_size(grid)) for grid in references]
        return self.num_before_pictures(len(references)) + sum(nums)

    def num_before_pictures(self, num_pictures: int) -> int:
        """Tokens of a text that lie before or between the words of pictures."""
        ids = self.tokenizer(INSTRUCT.format(self.show_pictures([1] * num_pictures))).input_ids
        return last_picture(ids, self.picture_word) + 1 - num_pictures - NUM_DROPPED_EDIT

    @property
    def picture_word(self) -> int:
        return int(self.text_encoder.config.image_token_id)

    def show_pictures(self, nums: Sequence[int]) -> str:
        """What a user shows before the instruction: pictures of so many words."""
        return spread_pictures(SHOW * len(nums), nums)

    def read_size(self, grid: Grid) -> tuple[int, int]:
        """The size of a picture that the language model is shown: that at which the network sees it, but no more pixels
        than the model works best at."""
        height, width = grid[0] * self.patch, grid[1] * self.patch
        scale = min(self.own_size / math.sqrt(height * width), 1.0)
        return round(height * scale), round(width * scale)

    def blank_branch(self, grid: Grid, references: Sequence[Grid] = ()) -> Branch:
        num_facts = self.num_facts(references)
        text = torch.zeros(USUAL_TEXT_TOKENS + num_facts, self.width, device=self.device, dtype=self.dtype)
        return self.facts_last(text, num_facts, grid, references)

    def branch(self, prompt: str, grid: Grid, seen: Seen = NOTHING) -> Branch:
        pairs = zip(seen.pictures, seen.grids, strict=True)
        shown = [resize_picture(picture, self.read_size(own)) for picture, own in pairs]
        words, num_facts = self.read_instruction(prompt, shown)
        return self.facts_last(self.joint_network.embed_prompt(words), num_facts, grid, seen.grids)

    def facts_last(self, text: Tensor, num_facts: int, grid: Grid, references: Sequence[Grid]) -> Branch:
        """A branch whose text begins with what depends on the prompt; each token keeps the position that it had."""
        rotary = self.rotary(len(text), grid, references)
        assert len(rotary) == len(text) + sum(math.prod(one) for one in (grid, *references))
        facts, rest, image = rotary.split([num_facts, len(text) - num_facts, len(rotary) - len(text)])
        ordered = torch.cat([text[num_facts:], text[:num_facts]])
        return Branch(ordered, text.new_empty(0), torch.cat([rest, facts, image]), num_facts=num_facts)

    def read_instruction(self, prompt: str, pictures: Sequence[Pixels]) -> tuple[Tensor, int]:
        """The last hidden states of the language model [text tokens, text channels], without those of its
        instructions, and how many of the first tell of the pictures alone."""
        seen = [self.processor.read(picture) for picture in pictures]
        nums = [rows * columns // self.processor.merge**2 for _, (rows, columns) in seen]
        found = self.tokenizer(
            [INSTRUCT.format(self.show_pictures(nums) + without_pictures(prompt))], return_tensors="pt"
        )
        looks = {}
        if seen:
            looks["pixel_values"] = torch.cat([patches for patches, _ in seen]).to(self.device)
            looks["image_grid_thw"] = torch.tensor([(1, *grid) for _, grid in seen], device=self.device)
        found = found.to(self.device)
        states = self.text_encoder.model(
            input_ids=found.input_ids,
            attention_mask=found.attention_mask,
            output_hidden_states=True,
            use_cache=False,
            **looks,
        ).hidden_states[-1][0]
        ids = found.input_ids[0].tolist()
        num_facts = last_picture(ids, self.picture_word) + 1 - NUM_DROPPED_EDIT if seen else 0
        return states[NUM_DROPPED_EDIT:][: num_facts + MOST_READ].to(self.dtype), num_facts


@dataclass(frozen=True, eq=False)
class QwenEditPlusModel(QwenEditModel):
    """Qwen-Image-Edit of several pictures (2509): the network sees the picture and references after it, and the
    language model reads all of them, numbered and small."""

    max_references = 2
    references_replace = False
    stock_masks = False

    @property
    def stock_pipeline_name(self) -> str:
        return "QwenImageEditPlusPipeline"

    @property
    def stock_arguments(self) -> dict[str, Any]:
        return {}

    def show_pictures(self, nums: Sequence[int]) -> str:
        numbered = [f"Picture {number}: {SHOW}" for number in range(1, len(nums) + 1)]
        return spread_pictures("".join(numbered), nums)

    def read_size(self, grid: Grid) -> tuple[int, int]:
        """Whole multiples of 32 pixels, as in the stock pipeline."""
        height, width = grid
        sides = READ_SIDE * math.sqrt(height / width), READ_SIDE * math.sqrt(width / height)
        rows, columns = (max(round(side / 32), 1) for side in sides)
        return rows * 32, columns * 32


def without_pictures(prompt: str) -> str:
    """A prompt that shows no picture by a word of its own, not even after some are taken out."""
    while PICTURE in prompt:
        prompt = prompt.replace(PICTURE, "")
    return prompt


def last_picture(ids: Sequence[int], word: int) -> int:
    """The place of the last word of a picture."""
    return max(place for place, id in enumerate(ids) if id == word)

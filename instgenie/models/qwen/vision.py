"""Pictures as the language model of Qwen-Image-Edit reads them: patches of normalised pixels, and a prompt that has a
word for every few of them. Computes what transformers' processor does, which needs torchvision. Knows no weights."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, PreTrainedTokenizerBase

from instgenie.errors import ModelError
from instgenie.types import Pixels

PICTURE = "<|image_pad|>"  # the word of a picture in a prompt
CONFIGS = ("preprocessor_config.json", "processor_config.json")  # the second has the settings of pictures inside
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280  # transformers' own
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PictureReader:
    """How a vision encoder wants to see pictures. A square of `merge` by `merge` patches is one word."""

    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    patch: int = 14  # side in pixels
    merge: int = 2
    num_frames: int = 2  # a picture is a film in which nothing moves
    mean: tuple[float, ...] = MEAN
    deviation: tuple[float, ...] = DEVIATION

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the settings that transformers saves with a processor."""
        path = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
        if path is None:
            raise ModelError(f"{folder} holds no settings of a processor: {' or '.join(CONFIGS)} is expected")
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            config = found.get("image_processor", found)
            size = config.get("size") or {}
            return cls(
                min_pixels=config.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
                max_pixels=config.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
                patch=config.get("patch_size", 14),
                merge=config.get("merge_size", 2),
                num_frames=config.get("temporal_patch_size", 2),
                mean=tuple(config.get("image_mean", MEAN)),
                deviation=tuple(config.get("image_std", DEVIATION)),
            )
        except (ValueError, AttributeError, TypeError) as error:
            raise ModelError(f"{path} has no settings of a processor: {error}") from error

    @property
    def unit(self) -> int:
        """The side in pixels of the square that is one word."""
        return self.patch * self.merge

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The size in whole words at which a picture is read."""
        unit = self.unit
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            scale = math.sqrt(self.max_pixels / (height * width))
            rows, columns = (max(math.floor(side * scale / unit), 1) for side in (height, width))
        elif rows * columns * unit**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
        return rows * unit, columns * unit

    def num_words(self, height: int, width: int) -> int:
        """The words of a picture of this size."""
        height, width = self.size_of(height, width)
        return height * width // self.unit**2

    def read(self, picture: Pixels) -> tuple[Tensor, tuple[int, int]]:
        """The patches of a picture, word after word [patches, channels], and the rows and columns of patches."""
        height, width = self.size_of(*picture.shape[:2])
        image = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.mean, self.deviation))
        words = ((pixels - mean) / deviation).reshape(
            3, height // self.unit, self.merge, self.patch, width // self.unit, self.merge, self.patch
        )
        patches = words.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :].expand(
            -1, -1, -1, -1, -1, self.num_frames, -1, -1
        )  # [rows, columns of words, rows, columns of patches in a word, colours, frames, height, width]
        grid = height // self.patch, width // self.patch
        return patches.reshape(grid[0] * grid[1], -1), grid


class VisionProcessor:
    """What diffusers' pipelines call with prompts and their pictures, over our own reader of pictures."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reader: PictureReader) -> None:
        self.tokenizer, self.reader = tokenizer, reader

    def __call__(
        self,
        text: Sequence[str],
        images: Image.Image | Sequence[Image.Image] | None = None,
        padding: bool = True,
        return_tensors: str = "pt",
    ) -> BatchFeature:
        """Every word of a picture in the prompts stands for the next of the pictures."""
        images = [images] if isinstance(images, Image.Image) else images or []
        seen = [self.reader.read(np.array(image.convert("RGB"))) for image in images]
        nums = iter([rows * columns // self.reader.merge**2 for _, (rows, columns) in seen])
        prompts = [spread_pictures(prompt, [next(nums) for _ in range(prompt.count(PICTURE))]) for prompt in text]
        found = dict(self.tokenizer(prompts, padding=padding, return_tensors=return_tensors))
        if seen:
            found["pixel_values"] = torch.cat([patches for patches, _ in seen])
            found["image_grid_thw"] = torch.tensor([(1, *grid) for _, grid in seen])
        return BatchFeature(found)


def spread_pictures(prompt: str, nums: Sequence[int]) -> str:
    """Repeat the word of each picture in a prompt as often as the picture has words."""
    first, *rest = prompt.split(PICTURE)
    return first + "".join(PICTURE * num + part for num, part in zip(nums, rest, strict=True))

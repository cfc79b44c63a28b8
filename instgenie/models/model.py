"""A model: the parts of a diffusers pipeline on one device, and what the engine asks of any family.

Everything in which families differ is behind these methods, so that preparing, stepping, registering and finishing know
no family.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from torch import Tensor
from transformers import CLIPTextModel, PreTrainedTokenizerBase

from instgenie.cost.network import NetworkShape
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Branch, Job
from instgenie.jobs.sampler import Schedule
from instgenie.models.identity import identify
from instgenie.types import Edit

Keep = Callable[[Tensor], None]  # takes what activations keep [branches, 2 or 1, tokens, width], place after place
CIRCUMSTANCES = ("name", "device", "dtype", "scheduler")  # no part of a model's identity; keys have the last two


@dataclass(frozen=True, eq=False)
class Model(ABC):
    family: ClassVar[str]  # a key of `FAMILIES`
    network_name: ClassVar[str]  # of the part that denoises: transformer or unet
    is_convolutional: ClassVar[bool]  # the network convolves, so on CUDA its weights are in channels-last order
    latents_per_token: ClassVar[int]  # side of a token's patch in latents

    name: str
    vae: AutoencoderKL | AutoencoderTiny
    text_encoder: CLIPTextModel
    tokenizer: PreTrainedTokenizerBase
    scheduler: Any
    device: torch.device
    dtype: torch.dtype
    own_size: int  # side in pixels of the square it works at best
    steps: int  # what an edit gets that does not say
    guidance: float  # what an edit gets that does not say

    @property
    def network(self) -> torch.nn.Module:
        """The part that denoises, diffusers' transformer or UNet."""
        network: torch.nn.Module = getattr(self, self.network_name)
        return network

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of the diffusers pipeline, by name."""
        names = ("vae", "text_encoder", "tokenizer", "scheduler", self.network_name)
        return {name: getattr(self, name) for name in names}

    @property
    @abstractmethod
    def stock_pipeline_name(self) -> str:
        """The class of diffusers' inpainting pipeline that computes the same edits."""

    @property
    def stock_parts(self) -> dict[str, Any]:
        """The arguments that construct the stock pipeline."""
        return self.parts

    @property
    def stock_arguments(self) -> dict[str, Any]:
        """Arguments of a call of the stock pipeline that are the same for every edit."""
        return {"strength": 1.0}

    @property
    def num_text_tokens(self) -> int:
        """Tokens of a prompt as the network sees it; every prompt is padded to this length."""
        return int(self.tokenizer.model_max_length)

    @cached_property
    def digest(self) -> str:
        """Says which weights these are; taken once, when first asked for."""
        names = [field.name for field in fields(self)]
        return identify({name: getattr(self, name) for name in names if name not in CIRCUMSTANCES})

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def pixels_per_latent(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def patch(self) -> int:
        """Side of a token's patch in pixels."""
        return self.latents_per_token * self.pixels_per_latent

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Working sizes are multiples of this."""

    @property
    @abstractmethod
    def is_fill(self) -> bool:
        """Fill models see the clean picture around the hole and the mask as channels beside the latents."""

    @property
    @abstractmethod
    def run_lengths(self) -> tuple[int, ...]:
        """Numbers of blocks in the runs in which dropped tokens stay dropped."""

    @property
    @abstractmethod
    def max_captured(self) -> int:
        """Readers of a pass, branches or jobs, up to which launching takes longer than computing, so that capturing it
        pays."""

    @property
    def num_blocks(self) -> int:
        return sum(self.run_lengths)

    @abstractmethod
    def describe(self) -> NetworkShape:
        """What its blocks compute and what activations keep of them, as plain numbers."""

    @abstractmethod
    def schedule(self, edit: Edit, num_tokens: int) -> Schedule: ...

    @abstractmethod
    def guidance_scale(self, edit: Edit) -> float:
        """Of classifier-free guidance; above 1 an edit has two branches."""

    @property
    @abstractmethod
    def embeds_guidance(self) -> bool:
        """Whether the guidance of an edit enters the network."""

    def embedded_guidance(self, edit: Edit) -> float:
        """The guidance that enters the network; 0 where none does."""
        return float(edit.guidance) if self.embeds_guidance else 0.0

    @abstractmethod
    def branches(self, edit: Edit, grid: tuple[int, int]) -> tuple[Branch, ...]:
        """The prompt's, then the negative prompt's where guidance is true."""

    @abstractmethod
    def template_branches(self, grid: tuple[int, int], prompt: str, isolated: bool) -> tuple[Branch, ...]:
        """What a registration sees: the prompt's, then the empty negative prompt's where that is another thing; no
        text at all where it is isolated."""

    @abstractmethod
    def beside(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """Tokens of a clean picture and pixels of a mask [1, 1, height, width] -> what fill models see beside the
        latents [tokens, channels]."""

    def passes(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Jobs that go through the network together, one pass after the other."""
        return [list(jobs)]

    @abstractmethod
    def pack(self, jobs: Sequence[Job], pads: bool = False) -> Any:
        """What the network sees of one step of the jobs of a pass. With padded lists of tokens many masks look alike,
        and the numbers stay the same."""

    @abstractmethod
    def run(self, packed: Any) -> Tensor:
        """One pass through the network."""

    def predict(self, jobs: Sequence[Job]) -> list[list[Tensor]]:
        """To each job, for each of its branches, a prediction [tokens, channels] of all tokens or of the masked."""
        predicted: dict[Job, list[Tensor]] = {}
        for together in self.passes(jobs):
            packed = self.pack(together)
            predicted |= zip(together, packed.deal(self.run(packed)), strict=True)
        return [predicted[job] for job in jobs]

    @abstractmethod
    def observe(self, jobs: Sequence[Job], kind: Kind, keep: Keep) -> None:
        """A dense pass; what activations keep of it is handed over in the order of the pass."""

    @abstractmethod
    def observe_time(self, jobs: Sequence[Job]) -> Tensor:
        """What modulates the blocks [jobs, width]; no width where nothing does that `y` would need."""


def pack_latents(latents: Tensor, latents_per_token: int = 2) -> Tensor:
    """[1, channels, side * rows, side * columns] -> [rows * columns, channels * side * side]"""
    side = latents_per_token
    _, channels, height, width = latents.shape
    patches = latents.reshape(channels, height // side, side, width // side, side).permute(1, 3, 0, 2, 4)
    return patches.reshape(-1, channels * side * side)


def unpack_latents(tokens: Tensor, grid: tuple[int, int], latents_per_token: int = 2) -> Tensor:
    """[rows * columns, channels * side * side] -> [1, channels, side * rows, side * columns]"""
    side = latents_per_token
    num_rows, num_columns = grid
    patches = tokens.view(num_rows, num_columns, -1, side, side).permute(2, 0, 3, 1, 4)
    return patches.reshape(1, -1, side * num_rows, side * num_columns)


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, length: int) -> Tensor:  # [1, text tokens]
    ids: Tensor = tokenizer(
        prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids

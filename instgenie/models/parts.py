"""The parts of a diffusers pipeline on one device: modules, tokenizers and a scheduler, and facts about them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderTiny
from torch import Tensor, nn
from transformers import CLIPTextModel, PreTrainedTokenizerBase

from instgenie.adapters.keys import NETWORK
from instgenie.adapters.layers import Alias, LayerTable
from instgenie.adapters.modules import describe_layers
from instgenie.models.identity import identify
from instgenie.types import Edit

NOT_IDENTITY = (  # keys of activations contain dtype and scheduler on their own; `removes` chooses a strength alone
    "name", "device", "dtype", "scheduler", "convolutions", "tile", "removes",
)  # fmt: skip

Autoencoder: TypeAlias = AutoencoderKL | AutoencoderKLFlux2 | AutoencoderKLQwenImage | AutoencoderTiny


@dataclass(frozen=True, eq=False)
class PipelineParts(ABC):
    family: ClassVar[str]  # a key of `FAMILIES`
    network_name: ClassVar[str]  # the part that denoises: transformer or unet
    is_convolutional: ClassVar[bool]  # the network convolves, so on CUDA its weights are in channels-last order
    latents_per_token: ClassVar[int]  # side of a token's patch in latents
    stock_batches: ClassVar[bool] = True  # the stock pipeline takes several pictures at once
    stock_masks: ClassVar[bool] = True  # the stock pipeline takes masks
    foreign_names: ClassVar["staticmethod[[Any], dict[str, Alias]]"]  # of layers of the network, as LoRAs use them

    name: str  # as the user gave it
    vae: Autoencoder
    text_encoder: CLIPTextModel
    tokenizer: PreTrainedTokenizerBase
    scheduler: Any
    device: torch.device
    dtype: torch.dtype
    own_size: int  # side in pixels of the square it works best at
    steps: int  # of edits that ask for no number of steps
    guidance: float  # of edits that ask for no guidance
    removes: bool = field(default=False, kw_only=True)  # it is trained to remove things, and does so from noise

    @property
    def network(self) -> torch.nn.Module:
        """The part that denoises: diffusers' transformer or UNet."""
        network: torch.nn.Module = getattr(self, self.network_name)
        return network

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of the pipeline by name."""
        names = ("vae", "text_encoder", "tokenizer", "scheduler", self.network_name)
        return {name: getattr(self, name) for name in names}

    @cached_property
    def digest(self) -> str:
        """A digest of all weights, configs and tokenizers; computed once."""
        names = [one.name for one in fields(self)]
        return identify({name: getattr(self, name) for name in names if name not in NOT_IDENTITY})

    @cached_property
    def patchable(self) -> dict[str, nn.Module]:
        """The parts whose layers a LoRA may patch."""
        encoders = {name: part for name, part in self.parts.items() if name.startswith("text_encoder")}
        return {NETWORK: self.network, **encoders}

    @cached_property
    def layer_table(self) -> LayerTable:
        """The layers that a LoRA may patch."""
        return describe_layers(self.patchable, self.foreign_names(self.network))

    @property
    @abstractmethod
    def stock_pipeline_name(self) -> str:
        """The class of diffusers' inpainting pipeline that computes the same edits."""

    @property
    def stock_reference_pipeline_name(self) -> str | None:
        """The class of diffusers' pipeline that keeps K and V of the picture it sees; None: there is none."""
        return None

    @property
    def stock_parts(self) -> dict[str, Any]:
        """The arguments that construct the stock pipeline."""
        return self.parts

    @property
    def stock_arguments(self) -> dict[str, Any]:
        """Arguments of a call of the stock pipeline that are the same for every edit."""
        return {"strength": 1.0}

    def stock_guidance(self, edits: Sequence[Edit]) -> dict[str, Any]:
        """Arguments of a call of the stock pipeline that guide these edits."""
        return {"guidance_scale": edits[0].guidance}

    @property
    def num_text_tokens(self) -> int:
        """Tokens of every prompt in the network; prompts are padded to this length."""
        return int(self.tokenizer.model_max_length)

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    def normalized(self, tokens: Tensor) -> Tensor:  # [tokens, channels]
        """Latents of the autoencoder as the network sees them."""
        config = self.vae.config
        return (tokens - float(config.shift_factor or 0)) * float(config.scaling_factor)

    def denormalized(self, tokens: Tensor) -> Tensor:  # [tokens, channels]
        """Latents of the network as the autoencoder decodes them."""
        config = self.vae.config
        return tokens / float(config.scaling_factor) + float(config.shift_factor or 0)

    @property
    def pixels_per_latent(self) -> int:
        """Side in pixels of a latent's square."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def patch(self) -> int:
        """Side of a token's patch in pixels."""
        return self.latents_per_token * self.pixels_per_latent

    @property
    def max_side(self) -> int | None:
        """The largest side in pixels of a working size; None if the model has no limit of its own."""
        return None

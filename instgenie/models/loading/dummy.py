"""Published architectures with random weights, for speed work where the weights are not at hand.

Transformer, UNet and autoencoder are of the published shapes, built where they will run. Text encoders are not: one
random layer of the published width, over a vocabulary of three words, so what a prompt says makes no difference, and
the time they take says nothing. Pictures that come out are noise.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from instgenie.errors import ModelError

PREFIX = "dummy:"
KEPT = "context_embedder"
VOCABULARY = {"<pad>": 0, "</s>": 1, "<unk>": 2}
CLIP_TOKENS = 77
T5_TOKENS = 512
TRAINED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


@dataclass(frozen=True)
class Recipe:
    """How to make the parts of a pipeline. Networks have no weights before they are filled."""

    pipeline: str
    network: Callable[[], nn.Module]
    vae: Callable[[], nn.Module]
    others: Callable[[], dict[str, Any]]

    @property
    def large(self) -> dict[str, Callable[[], nn.Module]]:
        """The parts that take up memory."""
        return {"transformer" if self.pipeline.startswith("Flux") else "unet": self.network, "vae": self.vae}


def find_recipe(name: str) -> Recipe:
    recipe = RECIPES.get(name.removeprefix(PREFIX))
    if recipe is None:
        known = ", ".join(PREFIX + known for known in RECIPES)
        raise ModelError(f"unknown model {name!r}: {known} are the models without weights")
    return recipe


def count_dummy(recipe: Recipe, hollow: Collection[str] = ()) -> int:
    """Parameters of the network and the autoencoder that get weights, without making any."""
    makes = [make for part, make in recipe.large.items() if part not in hollow]
    return sum(parameter.numel() for make in makes for parameter in on_meta(make).parameters())


def make_parts(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, hollow: Collection[str] = ()
) -> dict[str, Any]:
    """Of hollow parts nothing gets weights but what prompts go through on their way into the network."""
    filled = {}
    for part, make in recipe.large.items():
        module = filled[part] = on_meta(make).to(dtype)
        children = dict(module.named_children())
        for child in [module] if part not in hollow else [children[KEPT]] if KEPT in children else []:
            fill_randomly(child.to_empty(device=device))
    others = recipe.others()
    encoders = {part: other.to(device, dtype) for part, other in others.items() if isinstance(other, nn.Module)}
    parts = others | encoders | filled
    for module in (encoders | filled).values():
        module.eval().requires_grad_(False)
    return parts


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@torch.no_grad()
def fill_randomly(module: nn.Module) -> nn.Module:
    """So that activations keep their size from layer to layer."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)
    return module


def flux_dev() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24,
        joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
    )  # fmt: skip


def sdxl_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 10),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(5, 10, 20), cross_attention_dim=2048, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    )  # fmt: skip


def sd21_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=96, attention_head_dim=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True,
        upcast_attention=True,
    )  # fmt: skip


def autoencoder(latent_channels: int, **config: Any) -> AutoencoderKL:
    return AutoencoderKL(
        latent_channels=latent_channels, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, **config,
    )  # fmt: skip


def flux_others() -> dict[str, Any]:
    t5 = T5Config(vocab_size=len(VOCABULARY), d_model=4096, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    return {
        "text_encoder": CLIPTextModel(clip(768)),
        "text_encoder_2": T5EncoderModel(t5),
        "tokenizer": tokenizer(CLIP_TOKENS),
        "tokenizer_2": tokenizer(T5_TOKENS),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def sdxl_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModel(clip(768)),
        "text_encoder_2": CLIPTextModelWithProjection(clip(1280, projection_dim=1280)),
        "tokenizer": tokenizer(CLIP_TOKENS),
        "tokenizer_2": tokenizer(CLIP_TOKENS),
        "scheduler": EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading"),
    }


def sd21_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModel(clip(1024)),
        "tokenizer": tokenizer(CLIP_TOKENS),
        "scheduler": DDIMScheduler(
            **TRAINED, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
        ),
    }


def clip(width: int, **config: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=width // 64, max_position_embeddings=CLIP_TOKENS,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, **config,
    )  # fmt: skip


def tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=num_tokens
    )


def flux_autoencoder() -> AutoencoderKL:
    return autoencoder(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)


RECIPES = {
    "flux.1-dev": Recipe("FluxPipeline", flux_dev, flux_autoencoder, flux_others),
    "sdxl-base-1.0": Recipe(
        "StableDiffusionXLPipeline", sdxl_unet, lambda: autoencoder(4, scaling_factor=0.13025), sdxl_others
    ),
    "sd2.1": Recipe("StableDiffusionPipeline", sd21_unet, lambda: autoencoder(4), sd21_others),
}

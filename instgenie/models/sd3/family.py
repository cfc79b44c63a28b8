"""Stable Diffusion 3 as loading sees it: its pipelines, what is supported of them, and two dummies."""

from functools import partial
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from instgenie.errors import ModelError
from instgenie.models.family import THREE_ENCODERS, Family, LoadedPipeline, check_flow_scheduler
from instgenie.models.recipe import CLIP_TOKENS, Recipe, clip_config, make_autoencoder, make_tokenizer, t5_config
from instgenie.models.sd3.model import MAX_T5_TOKENS, Sd3Model
from instgenie.models.sd3.network import Sd3Network

PARTS = ("transformer", *THREE_ENCODERS)


def make_sd3(loaded: LoadedPipeline) -> Sd3Model:
    """A model with the size, the steps and the guidance that the stock pipeline assumes."""
    transformer, vae = loaded.parts["transformer"], loaded.parts["vae"]
    check_flow_scheduler(loaded.name, loaded.parts["scheduler"])
    check_transformer(loaded.name, transformer, vae)
    own_size = transformer.config.sample_size * 2 ** (len(vae.config.block_out_channels) - 1)
    return Sd3Model(**loaded.parts, **loaded.placement, own_size=own_size, steps=28, guidance=7.0)


def check_transformer(name: str, transformer: SD3Transformer2DModel, vae: AutoencoderKL) -> None:
    """Refuse transformers with options that `sd3.network` does not compute."""
    config, latents = transformer.config, vae.config.latent_channels
    if config.in_channels != latents:
        raise ModelError(
            f"the transformer of {name!r} has {config.in_channels} channels: {latents}, those of a latent, are expected"
        )
    if config.patch_size != Sd3Model.latents_per_token or not config.pos_embed_max_size:
        raise ModelError(
            f"the transformer of {name!r} has patches of {config.patch_size} and "
            f"pos_embed_max_size={config.pos_embed_max_size}: patches of {Sd3Model.latents_per_token} and a number are "
            "expected"
        )
    if config.qk_norm not in (None, "rms_norm"):
        raise ModelError(f"the transformer of {name!r} has qk_norm={config.qk_norm!r}: rms_norm or none is expected")


def published_transformer(
    num_layers: int, num_heads: int, pos_embed_max_size: int, num_dual: int = 0
) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=128, num_layers=num_layers, attention_head_dim=64, num_attention_heads=num_heads,
        caption_projection_dim=64 * num_heads, pooled_projection_dim=2048, pos_embed_max_size=pos_embed_max_size,
        dual_attention_layers=tuple(range(num_dual)), qk_norm="rms_norm",
    )  # fmt: skip


def published_autoencoder() -> AutoencoderKL:
    return make_autoencoder(
        16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
    )


def published_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModelWithProjection(clip_config(768, projection_dim=768)),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config(1280, projection_dim=1280)),
        "text_encoder_3": T5EncoderModel(t5_config(4096)),
        "tokenizer": make_tokenizer(CLIP_TOKENS),
        "tokenizer_2": make_tokenizer(CLIP_TOKENS),
        "tokenizer_3": make_tokenizer(MAX_T5_TOKENS),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }


def make_recipe(*sizes: int) -> Recipe:
    network = partial(published_transformer, *sizes)
    return Recipe("StableDiffusion3Pipeline", network, published_autoencoder, published_others)


SD3 = Family(
    pipelines={"StableDiffusion3Pipeline": PARTS, "StableDiffusion3InpaintPipeline": PARTS},
    network_name=Sd3Model.network_name,
    make=make_sd3,
    dummies={"sd3.5-large": make_recipe(38, 38, 192), "sd3.5-medium": make_recipe(24, 24, 384, 13)},
    prompt_layers=("context_embedder",),
    join_layers=lambda transformer: Sd3Network(transformer).join_projections(),
    fp8_layers=(r"transformer_blocks\.\d+\.(attn|attn2|ff|ff_context)\..+",),
)

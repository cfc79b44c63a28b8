"""The Flux family as loading sees it: its pipelines, its supported scheduler, its defaults and a dummy."""

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from instgenie.adapters.controlnets import FLUX_KIND
from instgenie.models.family import TWO_ENCODERS, Family, LoadedPipeline, check_flow_scheduler
from instgenie.models.flux.controlnet import load_flux_controlnet
from instgenie.models.flux.model import MAX_TEXT_TOKENS, FluxKontextModel, FluxModel
from instgenie.models.flux.network import FluxNetwork
from instgenie.models.recipe import CLIP_TOKENS, Recipe, clip_config, make_autoencoder, make_tokenizer, t5_config

PARTS = ("transformer", *TWO_ENCODERS)
KONTEXT = ("FluxKontextPipeline", "FluxKontextInpaintPipeline")


def make_flux(loaded: LoadedPipeline) -> FluxModel:
    check_flow_scheduler(loaded.name, loaded.parts["scheduler"])
    own_size, steps, guidance = stock_defaults(loaded.pipeline, loaded.parts["transformer"])
    make = FluxKontextModel if loaded.pipeline in KONTEXT else FluxModel
    return make(**loaded.parts, **loaded.placement, own_size=own_size, steps=steps, guidance=guidance)


def stock_defaults(pipeline: str, transformer: FluxTransformer2DModel) -> tuple[int, int, float]:
    """Size, steps and guidance that the stock pipeline assumes."""
    if pipeline == "FluxFillPipeline":
        return 1024, 50, 30.0
    return (1024, 28, 3.5) if transformer.config.guidance_embeds else (1024, 4, 0.0)


def dev_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24,
        joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
    )  # fmt: skip


def dev_autoencoder() -> AutoencoderKL:
    return make_autoencoder(
        16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
    )


def dev_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModel(clip_config(768)),
        "text_encoder_2": T5EncoderModel(t5_config(4096)),
        "tokenizer": make_tokenizer(CLIP_TOKENS),
        "tokenizer_2": make_tokenizer(MAX_TEXT_TOKENS),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


FLUX = Family(
    pipelines=dict.fromkeys(("FluxPipeline", "FluxInpaintPipeline", "FluxFillPipeline", *KONTEXT), PARTS),
    network_name=FluxModel.network_name,
    make=make_flux,
    dummies={
        "flux.1-dev": Recipe("FluxPipeline", dev_transformer, dev_autoencoder, dev_others),
        "flux.1-kontext-dev": Recipe("FluxKontextPipeline", dev_transformer, dev_autoencoder, dev_others),
    },
    prompt_layers=("context_embedder",),
    controlnets={FLUX_KIND: load_flux_controlnet},
    join_layers=lambda transformer: FluxNetwork(transformer).join_projections(),
    fp8_layers=(
        r"transformer_blocks\.\d+\.(attn|ff|ff_context)\..+",
        r"single_transformer_blocks\.\d+\.(attn\..+|proj_mlp|proj_out)",
    ),
)

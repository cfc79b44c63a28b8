"""The Flux family as loading sees it: its pipelines, its supported scheduler, its defaults and a dummy."""

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextModel, T5Config, T5EncoderModel

from instgenie.adapters.controlnets import FLUX_KIND
from instgenie.errors import ModelError
from instgenie.models.family import TWO_ENCODERS, Family, LoadedPipeline
from instgenie.models.flux.controlnet import load_flux_controlnet
from instgenie.models.flux.model import MAX_TEXT_TOKENS, FluxModel
from instgenie.models.flux.network import join_projections
from instgenie.models.recipe import CLIP_TOKENS, VOCABULARY, Recipe, clip_config, make_autoencoder, make_tokenizer

PARTS = ("transformer", *TWO_ENCODERS)


def make_flux(loaded: LoadedPipeline) -> FluxModel:
    check_scheduler(loaded.name, loaded.parts["scheduler"])
    own_size, steps, guidance = stock_defaults(loaded.pipeline, loaded.parts["transformer"])
    return FluxModel(**loaded.parts, **loaded.placement, own_size=own_size, steps=steps, guidance=guidance)


def stock_defaults(pipeline: str, transformer: FluxTransformer2DModel) -> tuple[int, int, float]:
    """Size, steps and guidance that the stock pipeline assumes."""
    if pipeline == "FluxFillPipeline":
        return 1024, 50, 30.0
    return (1024, 28, 3.5) if transformer.config.guidance_embeds else (1024, 4, 0.0)


def check_scheduler(name: str, scheduler: object) -> None:
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: a FlowMatchEulerDiscreteScheduler is expected"
        )
    if scheduler.config.stochastic_sampling or scheduler.config.invert_sigmas:
        raise ModelError(f"the scheduler of {name!r} has stochastic_sampling or invert_sigmas on: both must be off")


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
    t5 = T5Config(vocab_size=len(VOCABULARY), d_model=4096, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    return {
        "text_encoder": CLIPTextModel(clip_config(768)),
        "text_encoder_2": T5EncoderModel(t5),
        "tokenizer": make_tokenizer(CLIP_TOKENS),
        "tokenizer_2": make_tokenizer(MAX_TEXT_TOKENS),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


FLUX = Family(
    pipelines={"FluxPipeline": PARTS, "FluxInpaintPipeline": PARTS, "FluxFillPipeline": PARTS},
    network_name=FluxModel.network_name,
    make=make_flux,
    dummies={"flux.1-dev": Recipe("FluxPipeline", dev_transformer, dev_autoencoder, dev_others)},
    prompt_layers=("context_embedder",),
    join_layers=join_projections,
    controlnets={FLUX_KIND: load_flux_controlnet},
    fp8_layers=(
        r"transformer_blocks\.\d+\.(attn|ff|ff_context)\..+",
        r"single_transformer_blocks\.\d+\.(attn\..+|proj_mlp|proj_out)",
    ),
)

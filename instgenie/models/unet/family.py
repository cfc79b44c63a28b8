"""The UNets of Stable Diffusion as loading sees them: their pipelines, what is supported of them, and two dummies."""

from typing import Any, get_args

from diffusers import AutoencoderKL, DDIMScheduler, EulerDiscreteScheduler, PNDMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from instgenie.adapters.controlnets import UNET_KIND, UNION_KIND
from instgenie.errors import ModelError
from instgenie.jobs.sampler import Prediction
from instgenie.models.family import ONE_ENCODER, TWO_ENCODERS, Family, LoadedPipeline
from instgenie.models.recipe import CLIP_TOKENS, Recipe, clip_config, make_autoencoder, make_tokenizer
from instgenie.models.unet.controlnet import load_unet_controlnet, load_union_controlnet
from instgenie.models.unet.flow import join_projections
from instgenie.models.unet.model import UnetModel, UnetXlModel

PARTS, XL_PARTS = ("unet", *ONE_ENCODER), ("unet", *TWO_ENCODERS)
BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UNetMidBlock2DCrossAttn", "UpBlock2D", "CrossAttnUpBlock2D"}
OPTIONS: dict[str, tuple[object, ...]] = {  # of a UNet's config, and the supported values; None is anything falsy
    "addition_embed_type": (None, "text_time"),
    "attention_type": (None, "default"),
    "center_input_sample": (None,),
    "class_embed_type": (None,),
    "dual_cross_attention": (None,),
    "encoder_hid_dim_type": (None,),
    "num_class_embeds": (None,),
    "only_cross_attention": (None,),
    "time_cond_proj_dim": (None,),
    "time_embedding_act_fn": (None,),
}
TRAINED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def make_unet(loaded: LoadedPipeline) -> UnetModel:
    """A model with the size, the steps and the guidance that the stock pipelines assume."""
    unet, vae = loaded.parts["unet"], loaded.parts["vae"]
    check_unet(loaded.name, unet, vae)
    side = unet.config.sample_size
    own_size = (side if isinstance(side, int) else min(side)) * 2 ** (len(vae.config.block_out_channels) - 1)
    parts = loaded.parts | {"scheduler": choose_scheduler(loaded.name, loaded.parts["scheduler"])}
    fields = {**parts, **loaded.placement, "own_size": own_size, "steps": 50, "guidance": 7.5}
    if "text_encoder_2" not in parts:
        return UnetModel(**fields)
    return UnetXlModel(**fields, empty_is_zero=loaded.options.get("force_zeros_for_empty_prompt", False))


def choose_scheduler(name: str, scheduler: Any) -> DDIMScheduler | EulerDiscreteScheduler:
    """The scheduler as it is if it is DDIM or Euler. PNDM becomes its first order, DDIM: same noise, same timesteps."""
    if isinstance(scheduler, PNDMScheduler):
        scheduler = DDIMScheduler.from_config(scheduler.config, clip_sample=False, thresholding=False)
    if not isinstance(scheduler, DDIMScheduler | EulerDiscreteScheduler):
        raise ModelError(
            f"the model {name!r} has a {type(scheduler).__name__}: "
            "a DDIMScheduler, a EulerDiscreteScheduler or a PNDMScheduler is expected"
        )
    config = scheduler.config
    if config.prediction_type not in get_args(Prediction):
        raise ModelError(
            f"the scheduler of {name!r} has the prediction type {config.prediction_type!r}: "
            f"{' or '.join(get_args(Prediction))} is expected"
        )
    if config.get("clip_sample") or config.get("thresholding"):
        raise ModelError(f"the scheduler of {name!r} has clip_sample or thresholding on: both must be off")
    return scheduler


def check_unet(name: str, unet: UNet2DConditionModel, vae: AutoencoderKL) -> None:
    """Refuse UNets with blocks or options that `unet.network` does not compute."""
    config = unet.config
    kinds = {type(block).__name__ for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks) if block}
    if unknown := kinds - BLOCKS:
        raise ModelError(
            f"the unet of {name!r} has {', '.join(sorted(unknown))}: {', '.join(sorted(BLOCKS))} are supported"
        )
    unsupported = [option for option, values in OPTIONS.items() if (config.get(option) or None) not in values]
    if unsupported:
        found = ", ".join(f"{option}={config.get(option)!r}" for option in unsupported)
        raise ModelError(f"the unet of {name!r} has {found}: that is not supported")
    latents = vae.config.latent_channels
    if config.in_channels not in (latents, 2 * latents + 1):
        raise ModelError(
            f"the unet of {name!r} has {config.in_channels} channels: {latents}, or {2 * latents + 1} with mask and "
            "masked picture, are expected"
        )


def sdxl_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280), transformer_layers_per_block=(1, 2, 10),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(5, 10, 20), cross_attention_dim=2048, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    )  # fmt: skip


def sdxl_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModel(clip_config(768)),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config(1280, projection_dim=1280)),
        "tokenizer": make_tokenizer(CLIP_TOKENS),
        "tokenizer_2": make_tokenizer(CLIP_TOKENS),
        "scheduler": EulerDiscreteScheduler(**TRAINED, timestep_spacing="leading"),
    }


def sd21_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=96, attention_head_dim=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True,
        upcast_attention=True,
    )  # fmt: skip


def sd21_others() -> dict[str, Any]:
    return {
        "text_encoder": CLIPTextModel(clip_config(1024)),
        "tokenizer": make_tokenizer(CLIP_TOKENS),
        "scheduler": DDIMScheduler(
            **TRAINED, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
        ),
    }


UNET = Family(
    pipelines={
        "StableDiffusionPipeline": PARTS,
        "StableDiffusionInpaintPipeline": PARTS,
        "StableDiffusionXLPipeline": XL_PARTS,
        "StableDiffusionXLInpaintPipeline": XL_PARTS,
    },
    network_name=UnetModel.network_name,
    make=make_unet,
    join_layers=join_projections,
    dummies={
        "sdxl-base-1.0": Recipe(
            "StableDiffusionXLPipeline",
            sdxl_unet,
            lambda: make_autoencoder(4, scaling_factor=0.13025),
            sdxl_others,
            options={"force_zeros_for_empty_prompt": True},
        ),
        "sd2.1": Recipe("StableDiffusionPipeline", sd21_unet, lambda: make_autoencoder(4), sd21_others),
    },
    controlnets={UNET_KIND: load_unet_controlnet, UNION_KIND: load_union_controlnet},
    # layers whose input a norm or an activation writes: at these sizes, quantising apart costs more than it gains
    fp8_layers=(r".+\.transformer_blocks\.\d+\.(attn1\.to_[qkv]|attn2\.to_q|ff\..+)",),
)

"""Z-Image as loading sees it: its pipelines, what is supported of them, its defaults and a dummy."""

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3Model

from instgenie.errors import ModelError
from instgenie.models.family import ONE_ENCODER, Family, LoadedPipeline, check_flow_scheduler
from instgenie.models.recipe import VOCABULARY, Recipe, make_autoencoder, make_tokenizer
from instgenie.models.zimage.model import MAX_TEXT_TOKENS, ZImageModel
from instgenie.models.zimage.network import ZImageNetwork

PARTS = ("transformer", *ONE_ENCODER)
TURBO_SHIFT = 3.0  # of the scheduler of Z-Image-Turbo; that of Z-Image has a larger one
CHAT = "user: {{ messages[0].content }} assistant:"  # of a dummy


def make_zimage(loaded: LoadedPipeline) -> ZImageModel:
    """A model with the size, the steps and the guidance that the stock pipeline assumes, or those of the turbo."""
    transformer, vae, scheduler = (loaded.parts[part] for part in ("transformer", "vae", "scheduler"))
    check_flow_scheduler(loaded.name, scheduler)
    check_transformer(loaded.name, transformer, vae)
    check_tokenizer(loaded.name, loaded.parts["tokenizer"])
    steps, guidance = (8, 0.0) if scheduler.config.shift <= TURBO_SHIFT else (50, 5.0)
    return ZImageModel(**loaded.parts, **loaded.placement, own_size=1024, steps=steps, guidance=guidance)


def check_transformer(name: str, transformer: ZImageTransformer2DModel, vae: AutoencoderKL) -> None:
    """Refuse transformers with options that `zimage.network` does not compute."""
    config, latents = transformer.config, vae.config.latent_channels
    if config.in_channels != latents:
        raise ModelError(
            f"the transformer of {name!r} has {config.in_channels} channels: {latents}, those of a latent, are expected"
        )
    patches = list(config.all_patch_size), list(config.all_f_patch_size)
    if patches != ([ZImageModel.latents_per_token], [1]):
        raise ModelError(
            f"the transformer of {name!r} has patches of {patches[0]} in {patches[1]} frames: "
            f"patches of [{ZImageModel.latents_per_token}] in [1] are expected"
        )
    if config.siglip_feat_dim is not None or not config.qk_norm:
        raise ModelError(
            f"the transformer of {name!r} has siglip_feat_dim={config.siglip_feat_dim} and qk_norm={config.qk_norm}: "
            "none and true are expected"
        )


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of {name!r} has no chat template: prompts are what a user says in a chat")


def published_transformer() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel()  # its defaults are the published size


def published_autoencoder() -> AutoencoderKL:
    return make_autoencoder(
        16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
    )


def published_others() -> dict[str, Any]:
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=2560, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=20, num_key_value_heads=4, head_dim=128,
    )  # fmt: skip
    tokenizer = make_tokenizer(MAX_TEXT_TOKENS)
    tokenizer.chat_template = CHAT
    return {
        "text_encoder": Qwen3Model(config),
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=TURBO_SHIFT),
    }


ZIMAGE = Family(
    pipelines={"ZImagePipeline": PARTS, "ZImageInpaintPipeline": PARTS},
    network_name=ZImageModel.network_name,
    make=make_zimage,
    dummies={"z-image-turbo": Recipe("ZImagePipeline", published_transformer, published_autoencoder, published_others)},
    prompt_layers=("cap_embedder", "context_refiner", "cap_pad_token", "x_pad_token"),
    join_layers=lambda transformer: ZImageNetwork(transformer).join_projections(),
    fp8_layers=(r"(noise_refiner|layers)\.\d+\.(attention|feed_forward)\..+",),
)

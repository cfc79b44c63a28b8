"""FLUX.2 klein as loading sees it: its pipelines, what is supported of them, and dummies."""

from functools import partial
from typing import Any

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from instgenie.errors import ModelError
from instgenie.models.family import ONE_ENCODER, Family, LoadedPipeline, check_flow_scheduler
from instgenie.models.flux2.model import MAX_TEXT_TOKENS, TEXT_LAYERS, Flux2DistilledModel, Flux2KleinModel
from instgenie.models.flux2.network import Flux2Network
from instgenie.models.recipe import VOCABULARY, Recipe, make_tokenizer

PARTS = ("transformer", *ONE_ENCODER)
CHAT = "{{ messages[0]['content'] }}"  # of dummies, whose tokenizers know three words


def make_flux2(loaded: LoadedPipeline) -> Flux2KleinModel:
    """A model with the size that the stock pipeline assumes, and the steps and the guidance of its checkpoint."""
    check_flow_scheduler(loaded.name, loaded.parts["scheduler"])
    check_parts(loaded.name, loaded.parts)
    if loaded.options.get("is_distilled"):
        return Flux2DistilledModel(**loaded.parts, **loaded.placement, own_size=1024, steps=4, guidance=1.0)
    return Flux2KleinModel(**loaded.parts, **loaded.placement, own_size=1024, steps=50, guidance=4.0)


def check_parts(name: str, parts: dict[str, Any]) -> None:
    """Refuse parts that do not fit each other, or that the pass does not compute."""
    transformer, vae, encoder = parts["transformer"].config, parts["vae"], parts["text_encoder"].config
    if not isinstance(vae, AutoencoderKLFlux2):
        raise ModelError(f"the model {name!r} has a {type(vae).__name__}: an AutoencoderKLFlux2 is expected")
    side, channels = Flux2KleinModel.latents_per_token, vae.config.latent_channels
    if tuple(vae.config.patch_size) != (side, side) or transformer.patch_size != 1:
        raise ModelError(
            f"the model {name!r} has patches of {tuple(vae.config.patch_size)} latents and of {transformer.patch_size} "
            f"tokens: {(side, side)} and 1 are expected"
        )
    if transformer.in_channels != channels * side**2:
        raise ModelError(
            f"the transformer of {name!r} has {transformer.in_channels} channels: {channels * side**2}, those of a "
            "patch of latents, are expected"
        )
    width, depth = len(TEXT_LAYERS) * encoder.hidden_size, max(TEXT_LAYERS)
    if transformer.joint_attention_dim != width or encoder.num_hidden_layers < depth:
        raise ModelError(
            f"the text encoder of {name!r} has {encoder.num_hidden_layers} layers, and three of them have {width} "
            f"channels: at least {depth} layers and {transformer.joint_attention_dim} channels are expected"
        )


def published_transformer(
    num_layers: int, num_single_layers: int, num_heads: int, width: int
) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        num_layers=num_layers, num_single_layers=num_single_layers, num_attention_heads=num_heads,
        joint_attention_dim=len(TEXT_LAYERS) * width, guidance_embeds=False,
    )  # fmt: skip


def published_others(width: int) -> dict[str, Any]:
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=64, num_hidden_layers=max(TEXT_LAYERS),
        num_attention_heads=1, num_key_value_heads=1, head_dim=64, max_position_embeddings=MAX_TEXT_TOKENS,
    )  # fmt: skip
    tokenizer = make_tokenizer(MAX_TEXT_TOKENS)
    tokenizer.chat_template = CHAT
    return {
        "text_encoder": Qwen3ForCausalLM(config),
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    }


def make_recipe(is_distilled: bool, *sizes: int) -> Recipe:
    """A distilled model and its base have the same sizes; the last is the width of the text encoder."""
    others = partial(published_others, sizes[-1])
    network = partial(published_transformer, *sizes)
    return Recipe("Flux2KleinPipeline", network, AutoencoderKLFlux2, others, {"is_distilled": is_distilled})


FLUX2 = Family(
    pipelines={"Flux2KleinPipeline": PARTS, "Flux2KleinInpaintPipeline": PARTS},
    network_name=Flux2KleinModel.network_name,
    make=make_flux2,
    dummies={
        "flux.2-klein-4b": make_recipe(True, 5, 20, 24, 2560),
        "flux.2-klein-base-4b": make_recipe(False, 5, 20, 24, 2560),
        "flux.2-klein-9b": make_recipe(True, 8, 24, 32, 4096),
        "flux.2-klein-base-9b": make_recipe(False, 8, 24, 32, 4096),
    },
    prompt_layers=("context_embedder",),
    join_layers=lambda transformer: Flux2Network(transformer).join_projections(),
    fp8_layers=(
        r"transformer_blocks\.\d+\.(attn|ff|ff_context)\..+",
        r"single_transformer_blocks\.\d+\.attn\..+",
    ),
)

"""Qwen-Image and Qwen-Image-Edit as loading sees them: their pipelines, what is supported of them, and dummies."""

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from instgenie.errors import ModelError
from instgenie.models.family import ONE_ENCODER, Family, LoadedPipeline, check_flow_scheduler
from instgenie.models.qwen.model import QwenEditModel, QwenEditPlusModel, QwenModel
from instgenie.models.qwen.network import QwenNetwork
from instgenie.models.qwen.vision import PICTURE, PictureReader
from instgenie.models.recipe import VOCABULARY, Recipe, make_tokenizer

PARTS = ("transformer", *ONE_ENCODER)
EDIT_PARTS = (*PARTS, "processor")
MAKERS: dict[str, type[QwenModel]] = {
    "QwenImagePipeline": QwenModel,
    "QwenImageInpaintPipeline": QwenModel,
    "QwenImageEditPipeline": QwenEditModel,
    "QwenImageEditInpaintPipeline": QwenEditModel,
    "QwenImageEditPlusPipeline": QwenEditPlusModel,
}
WIDTH = 3584  # of the text encoder


def make_qwen(loaded: LoadedPipeline) -> QwenModel:
    """A model with the size, the steps and the guidance that the stock pipeline assumes."""
    check_flow_scheduler(loaded.name, loaded.parts["scheduler"])
    check_parts(loaded.name, loaded.parts)
    return MAKERS[loaded.pipeline](**loaded.parts, **loaded.placement, own_size=1024, steps=50, guidance=4.0)


def check_parts(name: str, parts: dict[str, Any]) -> None:
    """Refuse parts that do not fit each other, or with options that `qwen.network` does not compute."""
    transformer, vae = parts["transformer"].config, parts["vae"]
    if not isinstance(vae, AutoencoderKLQwenImage):
        raise ModelError(f"the model {name!r} has a {type(vae).__name__}: an AutoencoderKLQwenImage is expected")
    side, channels = QwenModel.latents_per_token, vae.config.z_dim
    if transformer.in_channels != channels * side**2 or transformer.patch_size != side:
        raise ModelError(
            f"the transformer of {name!r} has {transformer.in_channels} channels and patches of "
            f"{transformer.patch_size}: {channels * side**2} and {side} are expected"
        )
    options = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
    if on := [option for option in options if transformer.get(option)]:
        raise ModelError(f"the transformer of {name!r} has {', '.join(on)} on: all of {', '.join(options)} must be off")


def published_transformer() -> QwenImageTransformer2DModel:
    """Its table of positions is no weight, which nobody fills later, so it is made on a device with memory."""
    transformer = QwenImageTransformer2DModel()
    with torch.device("cpu"):
        axes = list(transformer.config.axes_dims_rope)
        transformer.pos_embed = QwenEmbedRope(theta=10000, axes_dim=axes, scale_rope=True)
    return transformer


def published_others() -> dict[str, Any]:
    """The tokenizer knows the word of a picture, which is behind its other words."""
    text = {
        "vocab_size": len(VOCABULARY) + 1, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24],
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=len(VOCABULARY))
    tokenizer = make_tokenizer(1024)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE]})
    return {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
    }


def published_edit_others() -> dict[str, Any]:
    return published_others() | {"processor": PictureReader(max_pixels=12845056)}


QWEN = Family(
    pipelines={pipeline: EDIT_PARTS if issubclass(kind, QwenEditModel) else PARTS for pipeline, kind in MAKERS.items()},
    network_name=QwenModel.network_name,
    make=make_qwen,
    dummies={
        "qwen-image": Recipe("QwenImagePipeline", published_transformer, AutoencoderKLQwenImage, published_others),
        "qwen-image-edit": Recipe(
            "QwenImageEditPipeline", published_transformer, AutoencoderKLQwenImage, published_edit_others
        ),
    },
    prompt_layers=("txt_norm", "txt_in"),
    readers={"processor": PictureReader.from_folder},
    join_layers=lambda transformer: QwenNetwork(transformer).join_projections(),
    fp8_layers=(r"transformer_blocks\.\d+\.(attn|img_mlp|txt_mlp)\..+",),
)

"""Keys of LoRA files, as the trainers in use write them: which part of a pipeline, which layer, which of its tensors.

unet.down_blocks.0.attentions.0.….attn1.to_q.lora_A.weight      diffusers and PEFT
unet.down_blocks.0.….attn1.processor.to_q_lora.down.weight      diffusers, before PEFT
lora_unet_down_blocks_0_attentions_0_…_attn1_to_q.lora_down.weight    kohya
lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight         kohya, with the names of Flux's own code
"""

from typing import Literal, NamedTuple

from instgenie.errors import LoraError

Tensor = Literal["down", "up", "alpha"]

NETWORK = "network"  # the part that denoises, whatever a pipeline calls it
T5 = "t5"  # the last text encoder, which kohya numbers 3 where a pipeline has only two

ENDINGS: dict[str, Tensor] = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_A.default.weight": "down",
    ".lora_B.default.weight": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".alpha": "alpha",
}
PARTS = {  # how keys of a part begin; the first that fits counts
    "base_model.model.text_encoder_3.": "text_encoder_3",
    "base_model.model.text_encoder_2.": "text_encoder_2",
    "base_model.model.text_encoder.": "text_encoder",
    "base_model.model.unet.": NETWORK,
    "base_model.model.transformer.": NETWORK,
    "base_model.model.": NETWORK,
    "text_encoder_3.": "text_encoder_3",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder.": "text_encoder",
    "unet.": NETWORK,
    "transformer.": NETWORK,
    "model.diffusion_model.": NETWORK,
    "diffusion_model.": NETWORK,
    "lora_unet_": NETWORK,
    "lora_transformer_": NETWORK,
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": T5,
}
OTHERS = {  # parts of keys that tell other methods
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon in Tucker form",
    "oft_": "OFT",
    "boft_": "BOFT",
    "ia3_": "IA3",
    ".diff": "a difference of whole weights",
    ".bias": "a bias",
}


class LoraKey(NamedTuple):
    part: str  # "network", "text_encoder", "text_encoder_2", "text_encoder_3" or "t5"
    layer: str  # its name, with underscores for dots
    tensor: Tensor


def parse_key(key: str) -> LoraKey:
    """Read a key, or raise a LoraError that names it."""
    ending = next((ending for ending in ENDINGS if key.endswith(ending)), None)
    if ending is None:
        other = next((method for mark, method in OTHERS.items() if mark in key), None)
        found = f"belongs to {other}, which is not supported" if other else "is not one of a LoRA"
        raise LoraError(f"the key {key!r} {found}: pairs of lora_A and lora_B, or lora_down and lora_up, are expected")
    start = next((start for start in PARTS if key.startswith(start)), "")
    layer = key.removesuffix(ending)[len(start) :].replace(".processor.", ".")
    return LoraKey(PARTS[start] if start else NETWORK, underscored(layer), ENDINGS[ending])


def underscored(name: str) -> str:
    """The name of a layer as all formats can be compared by."""
    return name.replace(".", "_")

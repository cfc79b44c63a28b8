"""Names that the original code of FLUX.2 gives to the layers of its transformer, as LoRAs of other trainers use them.
There one layer of a double block computes Q, K and V."""

from diffusers import Flux2Transformer2DModel

from instgenie.adapters.layers import Alias
from instgenie.models.joint.lora_names import flux_names

AROUND = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in_in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in_out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "double_stream_modulation_img_lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt_lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation_lin": "single_stream_modulation.linear",
    "final_layer_linear": "proj_out",
}
DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.linear_in",),
    "img_mlp_2": ("ff.linear_out",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.linear_in",),
    "txt_mlp_2": ("ff_context.linear_out",),
}
SINGLE = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}


def original_names(transformer: Flux2Transformer2DModel) -> dict[str, Alias]:
    """By underscored name, the layers that it stands for."""
    return flux_names(transformer, AROUND, DOUBLE, SINGLE)

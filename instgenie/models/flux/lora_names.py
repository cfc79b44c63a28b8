"""Names that Flux's own code gives to the layers of its transformer, as kohya's LoRAs use them. There one layer
computes Q, K and V."""

from diffusers import FluxTransformer2DModel

from instgenie.adapters.layers import Alias

AROUND = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in_in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in_out_layer": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in_in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in_out_layer": "time_text_embed.guidance_embedder.linear_2",
    "vector_in_in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in_out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer_linear": "proj_out",
}
DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "txt_mod_lin": ("norm1_context.linear",),
}
SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
}


def original_names(transformer: FluxTransformer2DModel) -> dict[str, Alias]:
    """By underscored name, the layers that it stands for."""
    names = {original: Alias((path,)) for original, path in AROUND.items()}
    names["final_layer_adaLN_modulation_1"] = Alias(("norm_out.linear",), swaps_halves=True)  # shift comes first there
    stacks = (
        ("double_blocks", "transformer_blocks", DOUBLE),
        ("single_blocks", "single_transformer_blocks", SINGLE),
    )
    for original, path, layers in stacks:
        for index in range(len(transformer.get_submodule(path))):
            names |= {
                f"{original}_{index}_{old}": Alias(tuple(f"{path}.{index}.{name}" for name in new))
                for old, new in layers.items()
            }
    known = {name for name, _ in transformer.named_modules()}
    return {original: alias for original, alias in names.items() if known.issuperset(alias.layers)}

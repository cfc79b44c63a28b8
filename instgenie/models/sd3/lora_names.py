"""Names that the original code of Stable Diffusion 3 gives to the layers of its transformer, as kohya's LoRAs use them.
There one layer computes Q, K and V."""

from diffusers import SD3Transformer2DModel

from instgenie.adapters.layers import Alias

AROUND = {
    "x_embedder_proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "t_embedder_mlp_0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder_mlp_2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder_mlp_0": "time_text_embed.text_embedder.linear_1",
    "y_embedder_mlp_2": "time_text_embed.text_embedder.linear_2",
    "final_layer_linear": "proj_out",
}
BLOCK = {
    "x_block_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block_attn_proj": ("attn.to_out.0",),
    "x_block_attn2_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block_attn2_proj": ("attn2.to_out.0",),
    "x_block_mlp_fc1": ("ff.net.0.proj",),
    "x_block_mlp_fc2": ("ff.net.2",),
    "x_block_adaLN_modulation_1": ("norm1.linear",),
    "context_block_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block_attn_proj": ("attn.to_add_out",),
    "context_block_mlp_fc1": ("ff_context.net.0.proj",),
    "context_block_mlp_fc2": ("ff_context.net.2",),
    "context_block_adaLN_modulation_1": ("norm1_context.linear",),
}


def original_names(transformer: SD3Transformer2DModel) -> dict[str, Alias]:
    """By underscored name, the layers that it stands for."""
    names = {original: Alias((path,)) for original, path in AROUND.items()}
    names["final_layer_adaLN_modulation_1"] = Alias(("norm_out.linear",), swaps_halves=True)  # shift comes first there
    for index, block in enumerate(transformer.transformer_blocks):
        for original, layers in BLOCK.items():
            # the text of the last block has a shift and a scale alone, in the other order
            swaps = original == "context_block_adaLN_modulation_1" and block.context_pre_only
            paths = tuple(f"transformer_blocks.{index}.{layer}" for layer in layers)
            names[f"joint_blocks_{index}_{original}"] = Alias(paths, swaps_halves=swaps)
    known = {name for name, _ in transformer.named_modules()}
    return {original: alias for original, alias in names.items() if known.issuperset(alias.layers)}

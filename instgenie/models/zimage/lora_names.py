"""Names that the original code of Z-Image gives to the layers of its transformer, as LoRAs of other trainers use them.
There one layer computes Q, K and V."""

from diffusers import ZImageTransformer2DModel

from instgenie.adapters.layers import Alias

AROUND = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer_linear": "all_final_layer.2-1.linear",
    "final_layer_adaLN_modulation_1": "all_final_layer.2-1.adaLN_modulation.1",
}
BLOCK = {
    "attention_qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention_out": ("attention.to_out.0",),
}


def original_names(transformer: ZImageTransformer2DModel) -> dict[str, Alias]:
    """By underscored name, the layers that it stands for. Other layers have the same names in both."""
    names = {original: Alias((path,)) for original, path in AROUND.items()}
    for stack in ("noise_refiner", "context_refiner", "layers"):
        for index in range(len(transformer.get_submodule(stack))):
            names |= {
                f"{stack}_{index}_{old}": Alias(tuple(f"{stack}.{index}.{name}" for name in new))
                for old, new in BLOCK.items()
            }
    known = {name for name, _ in transformer.named_modules()}
    return {original: alias for original, alias in names.items() if known.issuperset(alias.layers)}

"""Names that the original code of the Flux models gives to layers of their transformers. Families have the tables."""

from collections.abc import Mapping

from torch import nn

from instgenie.adapters.layers import Alias

Layers = Mapping[str, tuple[str, ...]]  # by original name, the layers of a block that it stands for


def flux_names(transformer: nn.Module, around: Mapping[str, str], double: Layers, single: Layers) -> dict[str, Alias]:
    """By underscored name, the layers that it stands for, of those that the transformer has."""
    names = {original: Alias((path,)) for original, path in around.items()}
    names["final_layer_adaLN_modulation_1"] = Alias(("norm_out.linear",), swaps_halves=True)  # shift comes first there
    stacks = (
        ("double_blocks", "transformer_blocks", double),
        ("single_blocks", "single_transformer_blocks", single),
    )
    for original, path, layers in stacks:
        for index in range(len(list(transformer.get_submodule(path).children()))):
            names |= {
                f"{original}_{index}_{old}": Alias(tuple(f"{path}.{index}.{name}" for name in new))
                for old, new in layers.items()
            }
    known = {name for name, _ in transformer.named_modules()}
    return {original: alias for original, alias in names.items() if known.issuperset(alias.layers)}

"""FLOPs per token of a module's products: two per weight. Norms and activations are not counted."""

from torch import nn


def products(*modules: nn.Module | None) -> int:
    weights = (weight for module in modules if module is not None for weight in module.parameters())
    return 2 * sum(weight.numel() for weight in weights if weight.ndim > 1)

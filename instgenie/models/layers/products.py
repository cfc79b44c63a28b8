"""FLOPs of a module's products for each token: two for each weight. Norms and activations count nothing."""

from torch import nn


def products(*modules: nn.Module | None) -> int:
    weights = (weight for module in modules if module is not None for weight in module.parameters())
    return 2 * sum(weight.numel() for weight in weights if weight.ndim > 1)

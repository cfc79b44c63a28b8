"""GELU (tanh approximation): alone, and beside the attended rows as the last product of a single block reads them."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.beside import beside_fused, beside_reference
from instgenie.kernels.quantize import Rows, quantize_rows_reference
from instgenie.kernels.switch import runs_fused


def gelu(x: Tensor, fp8: bool = False) -> Rows:
    """[tokens, channels], with `fp8` as products of low precision read it"""
    if runs_fused(x):
        return beside_gelu_fused([x[:, :0]], x, fp8)
    activated = F.gelu(x, approximate="tanh")
    return quantize_rows_reference(activated) if fp8 else activated


def beside_gelu(attended: Sequence[Tensor], x: Tensor, fp8: bool = False) -> Rows:
    """Rows [tokens, width + channels]: the attended rows, of which there is a tensor per branch, then the GELU of x."""
    if runs_fused(x):
        return beside_gelu_fused(attended, x, fp8)
    both = beside_gelu_reference(attended, x)
    return quantize_rows_reference(both) if fp8 else both


def beside_gelu_reference(attended: Sequence[Tensor], x: Tensor) -> Tensor:
    return beside_reference(attended, F.gelu(x, approximate="tanh"))


def beside_gelu_fused(attended: Sequence[Tensor], x: Tensor, fp8: bool = False) -> Rows:
    return beside_fused(attended, x, gated=False, fp8=fp8)

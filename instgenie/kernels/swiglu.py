"""The SiLU of the first half of the channels times the second half: alone, as the last product of a feed-forward layer
reads it, and beside the attended rows, as that of a single block does."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.beside import beside_fused, beside_reference
from instgenie.kernels.quantize import Rows, quantize_rows_reference
from instgenie.kernels.switch import runs_fused


def swiglu(x: Tensor, fp8: bool = False) -> Rows:
    """[tokens, 2 * channels] -> [tokens, channels], with `fp8` as products of low precision read it"""
    if runs_fused(x):
        return beside_swiglu_fused([x[:, :0]], x, fp8)
    gated = swiglu_reference(x)
    return quantize_rows_reference(gated) if fp8 else gated


def beside_swiglu(attended: Sequence[Tensor], x: Tensor, fp8: bool = False) -> Rows:
    """Rows [tokens, width + channels]: the attended rows, of which there is a tensor per branch, then the gated x."""
    if runs_fused(x):
        return beside_swiglu_fused(attended, x, fp8)
    both = beside_swiglu_reference(attended, x)
    return quantize_rows_reference(both) if fp8 else both


def swiglu_reference(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=1)
    return F.silu(gate) * value


def beside_swiglu_reference(attended: Sequence[Tensor], x: Tensor) -> Tensor:
    return beside_reference(attended, swiglu_reference(x))


def beside_swiglu_fused(attended: Sequence[Tensor], x: Tensor, fp8: bool = False) -> Rows:
    return beside_fused(attended, x, gated=True, fp8=fp8)

"""Layer norm with weights, of one tensor or of a sum that is returned, too. With `fp8`, the norm is written as products
of low precision read it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, store_fp8
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton


def layer_norm(x: Tensor, norm: nn.LayerNorm, fp8: bool = False) -> Rows:
    """Layer norm of [tokens, width]."""
    if runs_fused(x):
        return layer_norm_fused(x, norm, fp8)
    normed = layer_norm_reference(x, norm)
    return quantize_rows_reference(normed) if fp8 else normed


def add_layer_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm, fp8: bool = False) -> tuple[Tensor, Rows]:
    """The sum x + y and its norm."""
    if runs_fused(x):
        return add_layer_norm_fused(x, y, norm, fp8)
    total, normed = add_layer_norm_reference(x, y, norm)
    return total, quantize_rows_reference(normed) if fp8 else normed


def layer_norm_reference(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)


def add_layer_norm_reference(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, layer_norm_reference(total, norm)


def layer_norm_fused(x: Tensor, norm: nn.LayerNorm, fp8: bool = False) -> Rows:
    x = x.contiguous()
    out = empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, x, x, out, norm, adds=False)
    return out


def add_layer_norm_fused(x: Tensor, y: Tensor, norm: nn.LayerNorm, fp8: bool = False) -> tuple[Tensor, Rows]:
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, y, total, out, norm, adds=True)
    return total, out


def launch(x: Tensor, y: Tensor, total: Tensor, out: Rows, norm: nn.LayerNorm, adds: bool) -> None:
    num_tokens, width = x.shape
    weight = norm.weight if norm.weight is not None else x
    bias = norm.bias if norm.bias is not None else x
    normed, out_scale = (out.values, out.scale) if isinstance(out, Fp8Rows) else (out, x)
    if num_tokens:
        layer_norm_kernel[(num_tokens,)](
            x, y, total, normed, out_scale, weight, bias, norm.eps, width=width, block=power_of_two(width), adds=adds,
            has_weight=norm.weight is not None, has_bias=norm.bias is not None, quantizes=isinstance(out, Fp8Rows),
            num_warps=num_warps(width),
        )  # fmt: skip


@triton.jit()
def layer_norm_kernel(  # type: ignore[no-untyped-def]
    x, y, total, out, out_scale, weight, bias, eps, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
    has_weight: tl.constexpr, has_bias: tl.constexpr, quantizes: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    places = token * width + channel
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(y + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + places, value, mask=inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # normalise the sum as it is stored
    value = tl.where(inside, value - tl.sum(value) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value) / width + eps)
    if has_weight:
        value *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if quantizes:
        store_fp8(out, out_scale, token, channel, inside, value, width)
    else:
        tl.store(out + places, value, mask=inside)

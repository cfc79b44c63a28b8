"""GELU (tanh approximation): alone, and beside the attended rows as the last product of a single block reads them.

Rows of the input may be strided: they may be columns of a product that several layers share.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, scale_of
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton

MAX_BLOCK = 4096  # channels of one program, unless it needs a whole row


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
    width = attended[0].shape[1]
    both = x.new_empty(len(x), width + x.shape[1])
    torch.cat(list(attended), out=both[:, :width])
    both[:, width:] = F.gelu(x, approximate="tanh")  # on some CPUs torch leaves a strided `out` unwritten
    return both


def beside_gelu_fused(attended: Sequence[Tensor], x: Tensor, fp8: bool = False) -> Rows:
    """One launch per branch, since attention writes each branch to a place of its own."""
    num_tokens, (width, channels) = len(x), (attended[0].shape[1], x.shape[1])
    assert x.stride(1) == 1
    whole = width + channels
    out = empty_fp8((num_tokens, whole), x.device) if fp8 else x.new_empty(num_tokens, whole)
    values, scale = (out.values, out.scale) if isinstance(out, Fp8Rows) else (out, x)
    block = power_of_two(channels) if fp8 else min(power_of_two(whole), MAX_BLOCK)
    start = 0
    for rows in attended:
        if not len(rows):
            continue
        grid = (len(rows),) if fp8 else (len(rows), -(-whole // block))
        kernel = quantized_kernel if fp8 else gelu_kernel
        kernel[grid](
            rows if rows.stride(1) == 1 else rows.contiguous(), x, values, scale, start, rows.stride(0), x.stride(0),
            width=width, channels=channels, block=block, block_width=power_of_two(max(width, 1)),
            num_warps=num_warps(block),
        )  # fmt: skip
        start += len(rows)
    return out


@triton.jit()
def gelu_kernel(  # type: ignore[no-untyped-def]
    attended, x, out, out_scale, start, attended_stride, x_stride,
    width: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """One program per token and block of channels."""
    row = tl.program_id(0).to(tl.int64)
    token = start + row
    channel = tl.program_id(1) * block + tl.arange(0, block)
    is_hidden = (channel >= width) & (channel < width + channels)
    value = activate(tl.load(x + token * x_stride + channel - width, mask=is_hidden, other=0.0).to(tl.float32))
    if width:
        copied = tl.load(attended + row * attended_stride + channel, mask=channel < width, other=0.0)
        value = tl.where(is_hidden, value, copied.to(tl.float32))
    tl.store(out + token * (width + channels) + channel, value, mask=channel < width + channels)


@triton.jit()
def quantized_kernel(  # type: ignore[no-untyped-def]
    attended, x, out, out_scale, start, attended_stride, x_stride,
    width: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, block_width: tl.constexpr,
):  # fmt: skip
    """One program per token: both parts of a row share a scale."""
    row = tl.program_id(0).to(tl.int64)
    token = start + row
    to = out + token * (width + channels)
    channel = tl.arange(0, block)
    value = activate(tl.load(x + token * x_stride + channel, mask=channel < channels, other=0.0).to(tl.float32))
    largest = tl.max(tl.abs(value))
    if width:
        first = tl.arange(0, block_width)
        copied = tl.load(attended + row * attended_stride + first, mask=first < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(copied)))
        unit = scale_of(largest)
        tl.store(to + first, (copied / unit).to(out.dtype.element_ty), mask=first < width)
    unit = scale_of(largest)
    tl.store(out_scale + token, unit)
    tl.store(to + width + channel, (value / unit).to(out.dtype.element_ty), mask=channel < channels)


@triton.jit()
def activate(value):  # type: ignore[no-untyped-def]
    """(1 + tanh(z)) / 2 = sigmoid(2z); 1.59... is 2 * sqrt(2 / pi)"""
    return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))

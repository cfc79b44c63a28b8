"""Attended rows and activated rows side by side, as the last product of a single block reads them. The activation is a
GELU (tanh approximation), or the SiLU of the first half of the channels times the second half.

Rows of the input may be strided: they may be columns of a product that several layers share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, scale_of
from instgenie.kernels.switch import num_warps, power_of_two, tl, triton

MAX_BLOCK = 4096  # channels of one program, unless it needs a whole row


def beside_reference(attended: Sequence[Tensor], activated: Tensor) -> Tensor:
    width = attended[0].shape[1]
    both = activated.new_empty(len(activated), width + activated.shape[1])
    torch.cat(list(attended), out=both[:, :width])
    both[:, width:] = activated  # on some CPUs torch leaves a strided `out` unwritten
    return both


def beside_fused(attended: Sequence[Tensor], x: Tensor, gated: bool, fp8: bool = False) -> Rows:
    """One launch per branch, since attention writes each branch to a place of its own."""
    num_tokens, width = len(x), attended[0].shape[1]
    channels = x.shape[1] // 2 if gated else x.shape[1]
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
        kernel = quantized_kernel if fp8 else activated_kernel
        kernel[grid](
            rows if rows.stride(1) == 1 else rows.contiguous(), x, values, scale, start, rows.stride(0), x.stride(0),
            width=width, channels=channels, block=block, block_width=power_of_two(max(width, 1)), gated=gated,
            num_warps=num_warps(block),
        )  # fmt: skip
        start += len(rows)
    return out


@triton.jit()
def activated_kernel(  # type: ignore[no-untyped-def]
    attended, x, out, out_scale, start, attended_stride, x_stride,
    width: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, block_width: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """One program per token and block of channels."""
    row = tl.program_id(0).to(tl.int64)
    token = start + row
    channel = tl.program_id(1) * block + tl.arange(0, block)
    is_hidden = (channel >= width) & (channel < width + channels)
    hidden = x + token * x_stride + channel - width
    value = tl.load(hidden, mask=is_hidden, other=0.0).to(tl.float32)
    if gated:
        value *= tl.sigmoid(value) * tl.load(hidden + channels, mask=is_hidden, other=0.0).to(tl.float32)
    else:
        value *= gelu_share(value)
    if width:
        copied = tl.load(attended + row * attended_stride + channel, mask=channel < width, other=0.0)
        value = tl.where(is_hidden, value, copied.to(tl.float32))
    tl.store(out + token * (width + channels) + channel, value, mask=channel < width + channels)


@triton.jit()
def quantized_kernel(  # type: ignore[no-untyped-def]
    attended, x, out, out_scale, start, attended_stride, x_stride,
    width: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, block_width: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """One program per token: both parts of a row share a scale."""
    row = tl.program_id(0).to(tl.int64)
    token = start + row
    to = out + token * (width + channels)
    channel = tl.arange(0, block)
    hidden = x + token * x_stride + channel
    value = tl.load(hidden, mask=channel < channels, other=0.0).to(tl.float32)
    if gated:
        value *= tl.sigmoid(value) * tl.load(hidden + channels, mask=channel < channels, other=0.0).to(tl.float32)
    else:
        value *= gelu_share(value)
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
def gelu_share(value):  # type: ignore[no-untyped-def]
    """(1 + tanh(z)) / 2 = sigmoid(2z); 1.59... is 2 * sqrt(2 / pi)"""
    return tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))

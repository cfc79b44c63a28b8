"""The end of a residual block: its input, its output and the bias of its last layer, in one sum."""

import torch
from torch import Tensor

from instgenie.kernels.switch import runs_fused, tl, triton

BLOCK_TOKENS, BLOCK_CHANNELS = 32, 64


def add_bias(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """x + y + bias: x and y [pictures, channels, rows, columns] with channels last in memory, bias [channels]."""
    run = add_bias_fused if runs_fused(x) else add_bias_reference
    return run(x, y, bias)


def add_bias_reference(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return x + y + bias[:, None, None]


def add_bias_fused(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    x, y = (one.contiguous(memory_format=torch.channels_last) for one in (x, y))
    out = torch.empty_like(x)
    num_pictures, num_channels, num_rows, num_columns = x.shape
    num_tokens = num_pictures * num_rows * num_columns
    add_bias_kernel[(-(-num_tokens // BLOCK_TOKENS), -(-num_channels // BLOCK_CHANNELS))](
        x, y, bias, out, num_tokens, num_channels, block_tokens=BLOCK_TOKENS, block_channels=BLOCK_CHANNELS, num_warps=4
    )
    return out


@triton.jit()
def add_bias_kernel(  # type: ignore[no-untyped-def]
    x, y, bias, out, num_tokens, num_channels, block_tokens: tl.constexpr, block_channels: tl.constexpr
):
    """One program per block of tokens and block of channels."""
    token = (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64)[:, None]
    channel = (tl.program_id(1) * block_channels + tl.arange(0, block_channels))[None, :]
    inside = (token < num_tokens) & (channel < num_channels)
    at = token * num_channels + channel
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < num_channels, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=inside)

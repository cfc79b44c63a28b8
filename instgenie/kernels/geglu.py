"""The gate of a feed-forward layer: the first half of the channels times the GELU of the second half."""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

MAX_BLOCK = 1024


def geglu(x: Tensor) -> Tensor:
    """[tokens, 2 * width] -> [tokens, width]"""
    run = geglu_fused if runs_fused(x) else geglu_reference
    return run(x)


def geglu_reference(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=1)
    return value * F.gelu(gate)


def geglu_fused(x: Tensor) -> Tensor:
    x = x.contiguous()
    num_tokens, width = len(x), x.shape[1] // 2
    out = torch.empty(num_tokens, width, device=x.device, dtype=x.dtype)
    block = min(power_of_two(width), MAX_BLOCK)
    if num_tokens:
        geglu_kernel[(num_tokens, -(-width // block))](x, out, width=width, block=block, num_warps=4)
    return out


@triton.jit()
def geglu_kernel(x, out, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    value = tl.load(x + token * 2 * width + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + token * 2 * width + width + channel, mask=inside, other=0.0).to(tl.float32)
    gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
    tl.store(out + token * width + channel, value * gate, mask=inside)

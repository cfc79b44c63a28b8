"""The gate of a feed-forward layer: the first half of the channels times the GELU of the second half."""

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, store_fp8
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton

MAX_BLOCK = 1024  # channels of one program, unless it needs a whole row


def geglu(x: Tensor, fp8: bool = False) -> Rows:
    """[tokens, 2 * width] -> [tokens, width], with `fp8` as products of low precision read it"""
    if runs_fused(x):
        return geglu_fused(x, fp8)
    gated = geglu_reference(x)
    return quantize_rows_reference(gated) if fp8 else gated


def geglu_reference(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=1)
    return value * F.gelu(gate)


def geglu_fused(x: Tensor, fp8: bool = False) -> Rows:
    x = x.contiguous()
    num_tokens, width = len(x), x.shape[1] // 2
    out = empty_fp8((num_tokens, width), x.device) if fp8 else x.new_empty(num_tokens, width)
    values, scale = (out.values, out.scale) if isinstance(out, Fp8Rows) else (out, x)
    block = power_of_two(width) if fp8 else min(power_of_two(width), MAX_BLOCK)
    if num_tokens:
        geglu_kernel[(num_tokens, -(-width // block))](
            x, values, scale, width=width, block=block, quantizes=fp8, num_warps=num_warps(block)
        )
    return out


@triton.jit()
def geglu_kernel(  # type: ignore[no-untyped-def]
    x, out, out_scale, width: tl.constexpr, block: tl.constexpr, quantizes: tl.constexpr
):
    """One program per token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    value = tl.load(x + token * 2 * width + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + token * 2 * width + width + channel, mask=inside, other=0.0).to(tl.float32)
    gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
    if quantizes:
        store_fp8(out, out_scale, token, channel, inside, value * gate, width)
    else:
        tl.store(out + token * width + channel, value * gate, mask=inside)

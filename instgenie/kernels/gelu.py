"""GELU by its tanh approximation, written into a part of a wider tensor."""

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

MAX_BLOCK = 4096


def gelu_into(x: Tensor, out: Tensor) -> None:
    """[tokens, channels]; rows of out may lie apart."""
    run = gelu_into_fused if runs_fused(x) else gelu_into_reference
    run(x, out)


def gelu_into_reference(x: Tensor, out: Tensor) -> None:
    out.copy_(F.gelu(x, approximate="tanh"))  # torch's own `out` stays unwritten on some CPUs where its rows lie apart


def gelu_into_fused(x: Tensor, out: Tensor) -> None:
    num_tokens, width = x.shape
    assert x.is_contiguous()
    assert (out.shape, out.stride(1)) == (x.shape, 1)
    block = min(power_of_two(width), MAX_BLOCK)
    if num_tokens:
        gelu_kernel[(num_tokens, -(-width // block))](x, out, out.stride(0), width=width, block=block, num_warps=4)


@triton.jit()
def gelu_kernel(x, out, out_stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each block of channels of each token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    value = tl.load(x + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z; twice the square root of 2 / pi is in front
    activated = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(out + token * out_stride + channel, activated, mask=inside)

"""GELU (tanh approximation), written into part of a wider tensor."""

import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

MAX_BLOCK = 4096


def gelu_into(x: Tensor, out: Tensor) -> None:
    """Write the GELU of x [tokens, channels] into out [tokens, channels], whose rows may be strided."""
    run = gelu_into_fused if runs_fused(x) else gelu_into_reference
    run(x, out)


def gelu_into_reference(x: Tensor, out: Tensor) -> None:
    out.copy_(F.gelu(x, approximate="tanh"))  # on some CPUs torch leaves a strided `out` unwritten


def gelu_into_fused(x: Tensor, out: Tensor) -> None:
    num_tokens, width = x.shape
    assert x.is_contiguous()
    assert (out.shape, out.stride(1)) == (x.shape, 1)
    block = min(power_of_two(width), MAX_BLOCK)
    if num_tokens:
        gelu_kernel[(num_tokens, -(-width // block))](x, out, out.stride(0), width=width, block=block, num_warps=4)


@triton.jit()
def gelu_kernel(x, out, out_stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per token and block of channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    value = tl.load(x + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 = sigmoid(2z); 1.59... is 2 * sqrt(2 / pi)
    activated = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(out + token * out_stride + channel, activated, mask=inside)

"""RMS norms of blocks: rows by a factor, and sums with gated normalised rows. Factor and gate depend on a token's
branch and contain the weights of the norms.

Each of them is [branches, width]; `rows` [tokens] is the branch of each token. With a single branch, its row applies to
all tokens. With `fp8`, what a product reads next is written as it reads it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.modulate import spread
from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, store_fp8
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton


def rms_modulate(x: Tensor, factor: Tensor, rows: Tensor | None, eps: float, fp8: bool = False) -> Rows:
    """[tokens, width]: factor * norm(x)"""
    if runs_fused(x):
        return rms_modulate_fused(x, factor, rows, eps, fp8)
    normed = rms_modulate_reference(x, factor, rows, eps)
    return quantize_rows_reference(normed) if fp8 else normed


def add_rms_gated(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    """[tokens, width]: x + gate * norm(y)"""
    run = add_rms_gated_fused if runs_fused(x) else add_rms_gated_reference
    return run(x, gate, y, rows, eps)


def add_rms_modulate(
    x: Tensor, gate: Tensor, y: Tensor, factor: Tensor, rows: Tensor | None, eps_y: float, eps: float, fp8: bool = False
) -> tuple[Tensor, Rows]:
    """The sum x + gate * norm(y) and factor * norm(sum)."""
    if runs_fused(x):
        return add_rms_modulate_fused(x, gate, y, factor, rows, eps_y, eps, fp8)
    total = add_rms_gated_reference(x, gate, y, rows, eps_y)
    normed = rms_modulate_reference(total, factor, rows, eps)
    return total, quantize_rows_reference(normed) if fp8 else normed


def rms_modulate_reference(x: Tensor, factor: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    return spread(factor, rows) * F.rms_norm(x, x.shape[1:], eps=eps)


def add_rms_gated_reference(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    return torch.addcmul(x, spread(gate, rows), F.rms_norm(y, y.shape[1:], eps=eps))


def rms_modulate_fused(x: Tensor, factor: Tensor, rows: Tensor | None, eps: float, fp8: bool = False) -> Rows:
    x = x.contiguous()
    out = empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, factor, x, x, out, factor, rows, 0.0, eps, adds=False)
    return out


def add_rms_gated_fused(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    launch(x, gate, y, total, None, gate, rows, eps, 0.0, adds=True)
    return total


def add_rms_modulate_fused(
    x: Tensor, gate: Tensor, y: Tensor, factor: Tensor, rows: Tensor | None, eps_y: float, eps: float, fp8: bool = False
) -> tuple[Tensor, Rows]:
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, gate, y, total, out, factor, rows, eps_y, eps, adds=True)
    return total, out


def launch(
    x: Tensor, gate: Tensor, y: Tensor, total: Tensor, out: Rows | None, factor: Tensor, rows: Tensor | None,
    eps_y: float, eps: float, adds: bool,
) -> None:  # fmt: skip
    """`out` is None if the sum is not normalised."""
    num_tokens, width = x.shape
    assert gate.stride(1) == factor.stride(1) == 1
    normed = out.values if isinstance(out, Fp8Rows) else x if out is None else out
    if num_tokens:
        rms_kernel[(num_tokens,)](
            x, gate, y, total, normed, out.scale if isinstance(out, Fp8Rows) else x, factor,
            rows if rows is not None else x, gate.stride(0), factor.stride(0), eps_y, eps,
            width=width, block=power_of_two(width), has_rows=rows is not None and len(gate) > 1, adds=adds,
            norms=out is not None, quantizes=isinstance(out, Fp8Rows), num_warps=num_warps(width),
        )  # fmt: skip


@triton.jit()
def rms_kernel(  # type: ignore[no-untyped-def]
    x, gate, y, total, out, out_scale, factor, rows, gate_stride, factor_stride, eps_y, eps,
    width: tl.constexpr, block: tl.constexpr, has_rows: tl.constexpr, adds: tl.constexpr, norms: tl.constexpr,
    quantizes: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    places = token * width + channel
    gates, factors = channel, channel
    if has_rows:
        branch = tl.load(rows + token)
        gates, factors = branch * gate_stride + channel, branch * factor_stride + channel
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if adds:
        added = tl.load(y + places, mask=inside, other=0.0).to(tl.float32)
        added *= tl.rsqrt(tl.sum(added * added) / width + eps_y)
        value += tl.load(gate + gates, mask=inside, other=0.0).to(tl.float32) * added
        tl.store(total + places, value, mask=inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # normalise the sum as it is stored
    if norms:
        value *= tl.rsqrt(tl.sum(value * value) / width + eps)
        value *= tl.load(factor + factors, mask=inside, other=0.0).to(tl.float32)
        if quantizes:
            store_fp8(out, out_scale, token, channel, inside, value, width)
        else:
            tl.store(out + places, value, mask=inside)

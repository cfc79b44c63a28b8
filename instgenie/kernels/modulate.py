"""Modulation: layer norm with shift and scale, and gated sums. Shift, scale and gate depend on a token's branch.

Each of them is [branches, width]; `rows` [tokens] is the branch of each token. With a single branch, its row applies to
all tokens. With `fp8`, what a product reads next is written as it reads it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.quantize import Fp8Rows, Rows, empty_fp8, quantize_rows_reference, store_fp8
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float, fp8: bool = False) -> Rows:
    """[tokens, width]: (1 + scale) * norm(x) + shift"""
    if runs_fused(x):
        return norm_modulate_fused(x, shift, scale, rows, eps, fp8)
    normed = norm_modulate_reference(x, shift, scale, rows, eps)
    return quantize_rows_reference(normed) if fp8 else normed


def add_gated(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
    """[tokens, width]: x + gate * y"""
    run = add_gated_fused if runs_fused(x) else add_gated_reference
    return run(x, gate, y, rows)


def add_norm_modulate(
    x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float, fp8: bool = False
) -> tuple[Tensor, Rows]:
    """The sum x + gate * y and (1 + scale) * norm(sum) + shift."""
    if runs_fused(x):
        return add_norm_modulate_fused(x, gate, y, shift, scale, rows, eps, fp8)
    total, normed = add_norm_modulate_reference(x, gate, y, shift, scale, rows, eps)
    return total, quantize_rows_reference(normed) if fp8 else normed


def norm_modulate_reference(x: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    return torch.addcmul(spread(shift, rows), F.layer_norm(x, x.shape[1:], eps=eps), spread(1 + scale, rows))


def add_gated_reference(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
    return torch.addcmul(x, spread(gate, rows), y)


def add_norm_modulate_reference(
    x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x = add_gated_reference(x, gate, y, rows)
    return x, norm_modulate_reference(x, shift, scale, rows, eps)


def spread(column: Tensor, rows: Tensor | None) -> Tensor:
    """[branches, width] -> [tokens, width], or [1, width] to broadcast if there is one branch."""
    return column if rows is None or len(column) == 1 else column[rows]


def norm_modulate_fused(
    x: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float, fp8: bool = False
) -> Rows:
    x = x.contiguous()
    out = empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, shift, x, x, out, shift, scale, rows, eps, adds=False)
    return out


def add_gated_fused(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    launch(x, gate, y, total, None, gate, gate, rows, 0.0, adds=True)
    return total


def add_norm_modulate_fused(
    x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float, fp8: bool = False
) -> tuple[Tensor, Rows]:
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), empty_fp8(x.shape, x.device) if fp8 else torch.empty_like(x)
    launch(x, gate, y, total, out, shift, scale, rows, eps, adds=True)
    return total, out


def launch(
    x: Tensor, gate: Tensor, y: Tensor, total: Tensor, out: Rows | None, shift: Tensor, scale: Tensor,
    rows: Tensor | None, eps: float, adds: bool,
) -> None:  # fmt: skip
    """Shift and scale are views of one tensor and share its stride; the gate may be of another block. `out` is None if
    the sum is not normalised."""
    num_tokens, width = x.shape
    assert shift.stride() == scale.stride()
    assert gate.stride(1) == shift.stride(1) == 1
    normed = out.values if isinstance(out, Fp8Rows) else x if out is None else out
    if num_tokens:
        modulate_kernel[(num_tokens,)](
            x, gate, y, total, normed, out.scale if isinstance(out, Fp8Rows) else x, shift, scale,
            rows if rows is not None else x, gate.stride(0), shift.stride(0), eps,
            width=width, block=power_of_two(width), has_rows=rows is not None and len(gate) > 1, adds=adds,
            norms=out is not None, quantizes=isinstance(out, Fp8Rows), num_warps=num_warps(width),
        )  # fmt: skip


@triton.jit()
def modulate_kernel(  # type: ignore[no-untyped-def]
    x, gate, y, total, out, out_scale, shift, scale, rows, gate_stride, column_stride, eps,
    width: tl.constexpr, block: tl.constexpr, has_rows: tl.constexpr, adds: tl.constexpr, norms: tl.constexpr,
    quantizes: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    places = token * width + channel
    gates, columns = channel, channel
    if has_rows:
        branch = tl.load(rows + token)
        gates, columns = branch * gate_stride + channel, branch * column_stride + channel
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(gate + gates, mask=inside, other=0.0).to(tl.float32) * tl.load(
            y + places, mask=inside, other=0.0
        ).to(tl.float32)
        tl.store(total + places, value, mask=inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # normalise the sum as it is stored
    if norms:
        value = tl.where(inside, value - tl.sum(value) / width, 0.0)
        value *= tl.rsqrt(tl.sum(value * value) / width + eps)
        factor = 1 + tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
        moved = factor * value + tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
        if quantizes:
            store_fp8(out, out_scale, token, channel, inside, moved, width)
        else:
            tl.store(out + places, moved, mask=inside)

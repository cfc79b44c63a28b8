"""Modulation: layer norm with shift and scale, and gated sums. Shift, scale and gate depend on a token's branch.

Each of them is [branches, width]; `rows` [tokens] is the branch of each token. With a single branch, its row applies to
all tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    """[tokens, width]: (1 + scale) * norm(x) + shift"""
    run = norm_modulate_fused if runs_fused(x) else norm_modulate_reference
    return run(x, shift, scale, rows, eps)


def add_gated(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
    """[tokens, width]: x + gate * y"""
    run = add_gated_fused if runs_fused(x) else add_gated_reference
    return run(x, gate, y, rows)


def add_norm_modulate(
    x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum x + gate * y and (1 + scale) * norm(sum) + shift."""
    run = add_norm_modulate_fused if runs_fused(x) else add_norm_modulate_reference
    return run(x, gate, y, shift, scale, rows, eps)


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


def norm_modulate_fused(x: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(x, shift, x, x, out, shift, scale, rows, eps, adds=False, norms=True)
    return out


def add_gated_fused(x: Tensor, gate: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    launch(x, gate, y, total, x, gate, gate, rows, 0.0, adds=True, norms=False)
    return total


def add_norm_modulate_fused(
    x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor, rows: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    launch(x, gate, y, total, out, shift, scale, rows, eps, adds=True, norms=True)
    return total, out


def launch(
    x: Tensor, gate: Tensor, y: Tensor, total: Tensor, out: Tensor, shift: Tensor, scale: Tensor,
    rows: Tensor | None, eps: float, adds: bool, norms: bool,
) -> None:  # fmt: skip
    """Gate, shift and scale are views of one tensor and share its stride."""
    num_tokens, width = x.shape
    assert gate.stride() == shift.stride() == scale.stride()
    if num_tokens:
        modulate_kernel[(num_tokens,)](
            x, gate, y, total, out, shift, scale, rows if rows is not None else x, gate.stride(0), eps,
            width=width, block=power_of_two(width), has_rows=rows is not None and len(gate) > 1, adds=adds, norms=norms,
            num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip


@triton.jit()
def modulate_kernel(  # type: ignore[no-untyped-def]
    x, gate, y, total, out, shift, scale, rows, column_stride, eps,
    width: tl.constexpr, block: tl.constexpr, has_rows: tl.constexpr, adds: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    places = token * width + channel
    columns = channel
    if has_rows:
        columns = tl.load(rows + token) * column_stride + channel
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(
            y + places, mask=inside, other=0.0
        ).to(tl.float32)
        tl.store(total + places, value, mask=inside)
        value = value.to(total.dtype.element_ty).to(tl.float32)  # normalise the sum as it is stored
    if norms:
        value = tl.where(inside, value - tl.sum(value) / width, 0.0)
        value *= tl.rsqrt(tl.sum(value * value) / width + eps)
        factor = 1 + tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
        moved = factor * value + tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + places, moved, mask=inside)

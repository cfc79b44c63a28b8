"""Rows of activations, gathered straight to where they are read."""

import torch
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


def gather_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Rows [parts, rows, width] at the index [chosen] into out [parts, chosen, width]; parts may lie apart."""
    run = gather_rows_fused if runs_fused(out) else gather_rows_reference
    run(source, index, out)


def gather_rows_reference(source: Tensor, index: Tensor, out: Tensor) -> None:
    for part, part_out in zip(source, out, strict=True):
        torch.index_select(part, 0, index, out=part_out)


def gather_rows_fused(source: Tensor, index: Tensor, out: Tensor) -> None:
    num_parts, _, width = source.shape
    assert all(x[0].is_contiguous() for x in (source, out))
    assert out.shape == (num_parts, len(index), width)
    if len(index):
        gather_kernel[(len(index), num_parts)](
            source, index, out, source.stride(0), out.stride(0), width=width, block=power_of_two(width), num_warps=4
        )


@triton.jit()
def gather_kernel(source, index, out, part_stride, out_part_stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each row of each part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    taken = tl.load(index + row)
    values = tl.load(source + part * part_stride + taken * width + channel, mask=inside)
    tl.store(out + part * out_part_stride + row * width + channel, values, mask=inside)

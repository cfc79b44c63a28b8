"""Gathers rows of activations straight to where they are read."""

import torch
from torch import Tensor

from instgenie.kernels.addresses import Address, look_up
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


def gather_rows(
    source: Tensor | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    """Copy the rows of source [parts, all rows, width] at the index [chosen] into out [parts, chosen, width] or, with
    places [chosen], into these rows of out. The parts of out need not be contiguous. Rows that go to one place must be
    equal."""
    run = gather_rows_fused if runs_fused(out) else gather_rows_reference
    run(source, index, num_all, out, places)


def gather_rows_reference(
    source: Tensor | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    num_parts, _, width = out.shape
    for part, part_out in zip(look_up(source, (num_parts, num_all, width), out.dtype), out, strict=True):
        if places is None:
            torch.index_select(part, 0, index, out=part_out)
        else:
            part_out.index_copy_(0, places, part.index_select(0, index))


def gather_rows_fused(
    source: Tensor | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    num_parts, _, width = out.shape
    by_address = isinstance(source, Address)
    rows = source.table if isinstance(source, Address) else source
    part_stride = num_all * width if isinstance(source, Address) else source.stride(0)
    assert out[0].is_contiguous()
    assert by_address or rows[0].is_contiguous()
    assert len(index) == (out.shape[1] if places is None else len(places))
    if len(index):
        gather_kernel[(len(index), num_parts)](
            rows, index, out, index if places is None else places, part_stride, out.stride(0),
            width=width, block=power_of_two(width), by_address=by_address, has_places=places is not None, num_warps=4,
        )  # fmt: skip


@triton.jit()
def gather_kernel(  # type: ignore[no-untyped-def]
    source, index, out, places, part_stride, out_part_stride,
    width: tl.constexpr, block: tl.constexpr, by_address: tl.constexpr, has_places: tl.constexpr,
):  # fmt: skip
    """One program per row and part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    taken = tl.load(index + row)
    to = row
    if has_places:
        to = tl.load(places + row)
    rows = source
    if by_address:
        rows = tl.multiple_of(tl.load(source).to(out.dtype), 16)
    values = tl.load(rows + part * part_stride + taken * width + channel, mask=inside)
    tl.store(out + part * out_part_stride + to * width + channel, values, mask=inside)

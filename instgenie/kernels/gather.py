"""Gathers rows of activations straight to where they are read."""

from torch import Tensor

from instgenie.kernels.addresses import Address, look_up
from instgenie.kernels.packed import NUMBERS, PackedRows, is_packed, load_packed, row_size, unpacked
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton


def gather_rows(
    source: Tensor | PackedRows | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    """Copy the rows of source [parts, all rows, width] at the index [chosen] into out [parts, chosen, width] or, with
    places [chosen], into these rows of out, unpacked where they are packed. The parts of out need not be contiguous.
    Rows that go to one place must be equal."""
    run = gather_rows_fused if runs_fused(out) else gather_rows_reference
    run(source, index, num_all, out, places)


def gather_rows_reference(
    source: Tensor | PackedRows | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    num_parts, _, width = out.shape
    rows, packing = look_up(source, (num_parts, num_all, width), out.dtype)
    for part, part_out in zip(rows, out, strict=True):
        chosen = part.index_select(0, index)
        if is_packed(packing):
            chosen = unpacked(chosen, packing, out.dtype)
        if places is None:
            part_out.copy_(chosen)
        else:
            part_out.index_copy_(0, places, chosen)


def gather_rows_fused(
    source: Tensor | PackedRows | Address, index: Tensor, num_all: int, out: Tensor, places: Tensor | None = None
) -> None:
    num_parts, _, width = out.shape
    by_address = isinstance(source, Address)
    packing = "model" if isinstance(source, Tensor) else source.dtype
    rows = source.table if isinstance(source, Address) else source.rows if isinstance(source, PackedRows) else source
    part_stride = num_all * row_size(width, packing) if by_address else rows.stride(0)
    assert out[0].is_contiguous()
    assert by_address or rows[0].is_contiguous()
    assert len(index) == (out.shape[1] if places is None else len(places))
    if len(index):
        gather_kernel[(len(index), num_parts)](
            rows, index, out, index if places is None else places, part_stride, out.stride(0),
            width=width, block=power_of_two(width), by_address=by_address, has_places=places is not None,
            packing=NUMBERS[packing], is_aligned=row_size(width, packing) % 16 == 0, num_warps=4,
        )  # fmt: skip


@triton.jit()
def gather_kernel(  # type: ignore[no-untyped-def]
    source, index, out, places, part_stride, out_part_stride,
    width: tl.constexpr, block: tl.constexpr, by_address: tl.constexpr, has_places: tl.constexpr,
    packing: tl.constexpr, is_aligned: tl.constexpr,
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
    if by_address and packing:
        rows = tl.load(source).to(tl.pointer_type(tl.uint8))
        if is_aligned:  # several values are read at once
            rows = tl.multiple_of(rows, 16)
    elif by_address:
        rows = tl.multiple_of(tl.load(source).to(out.dtype), 16)
    if packing:
        values = load_packed(rows + part * part_stride, taken, channel, inside, width, packing)
    else:
        values = tl.load(rows + part * part_stride + taken * width + channel, mask=inside)
    at = part * out_part_stride + to * width + channel
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)

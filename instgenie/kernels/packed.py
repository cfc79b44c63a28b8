"""Rows in half the bytes of bfloat16: eight-bit floats (e4m3), each row followed by its scale.

    [width values of one byte | scale, a float of four bytes | 12 zero bytes that keep rows aligned]

A row is scaled so that its largest value is the largest e4m3 value; values of at most 2^-9 of it round to zero or to
the smallest steps of e4m3. A row with a value that is no finite number has no scale either, so that all of it is read
as NaN: a mistake stays visible instead of becoming some number. Code that keeps or moves packed rows sees bytes.
"""

import torch
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
NUM_SCALE_BYTES = 16  # the scale and the bytes that align rows


def pack_rows(rows: Tensor) -> Tensor:
    """[..., width] -> [..., bytes]"""
    width = rows.shape[-1]
    assert width % 4 == 0, width
    values = rows.float()
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = largest / LARGEST
    scale = torch.where(scale > 0, scale, 1.0).masked_fill(~largest.isfinite(), torch.nan)
    packed = rows.new_zeros(*rows.shape[:-1], width + NUM_SCALE_BYTES, dtype=torch.uint8)
    packed[..., :width] = (values / scale).nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
    packed[..., width : width + 4] = scale.view(torch.uint8)
    return packed


def unpacked_shape(packed: Tensor) -> tuple[int, ...]:
    return (*packed.shape[:-1], packed.shape[-1] - NUM_SCALE_BYTES)


def unpack_rows(packed: Tensor, out: Tensor) -> None:
    """Unpack rows [parts, rows, bytes] into out [parts, rows, width]."""
    run = unpack_rows_fused if runs_fused(out) else unpack_rows_reference
    run(packed, out)


def unpack_rows_reference(packed: Tensor, out: Tensor) -> None:
    width = out.shape[-1]
    scale = packed[..., width : width + 4].contiguous().view(torch.float32)
    out.copy_(packed[..., :width].contiguous().view(E4M3).float() * scale)


def unpack_rows_fused(packed: Tensor, out: Tensor) -> None:
    width = out.shape[-1]
    assert packed.is_contiguous()
    assert out.is_contiguous()
    assert packed.shape == (*out.shape[:-1], width + NUM_SCALE_BYTES)
    num_rows = out.numel() // width
    if num_rows:
        unpack_kernel[(num_rows,)](
            packed, packed.view(torch.float32), out,
            width=width, row_bytes=width + NUM_SCALE_BYTES, scale_at=width // 4, block=power_of_two(width),
            num_warps=4,
        )  # fmt: skip


@triton.jit()
def unpack_kernel(  # type: ignore[no-untyped-def]
    packed, floats, out,
    width: tl.constexpr, row_bytes: tl.constexpr, scale_at: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One program per row. The bits of an e4m3 value are those of a float16 except for the exponent's bias, so GPUs
    without the type can read them, too."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    bits = tl.load(packed + row * row_bytes + channel, mask=inside, other=0).to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    scale = tl.load(floats + row * (row_bytes // 4) + scale_at)
    tl.store(out + row * width + channel, (values * scale).to(out.dtype.element_ty), mask=inside)

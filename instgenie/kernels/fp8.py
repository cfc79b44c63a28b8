"""Rows in half the bytes of bfloat16: eight-bit floats (e4m3), each row followed by its scale.

    [width values of one byte | scale, a float of four bytes | 12 zero bytes that keep rows aligned]

A row is scaled so that its largest value is the largest e4m3 value; values of at most 2^-9 of it round to zero or to
the smallest steps of e4m3. A row with a value that is no finite number has no scale either, so that all of it is read
as NaN: a mistake stays visible instead of becoming some number.
"""

import torch
from torch import Tensor

from instgenie.kernels.switch import tl, triton

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


def row_bytes(width: int) -> int:
    """Bytes of a row of so many values."""
    return width + NUM_SCALE_BYTES


def row_width(num_bytes: int) -> int:
    """Values of a row of so many bytes."""
    return num_bytes - NUM_SCALE_BYTES


def unpack_rows_reference(packed: Tensor, out: Tensor) -> None:
    width = out.shape[-1]
    scale = packed[..., width : width + 4].contiguous().view(torch.float32)
    out.copy_(packed[..., :width].contiguous().view(E4M3).float() * scale)


@triton.jit()
def load_fp8(rows, row, channel, inside, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a row at `rows`, in float32. The bits of an e4m3 value are those of a float16 except for the exponent's
    bias, so GPUs without the type can read them, too."""
    start = rows + row * (width + 16)
    bits = tl.load(start + channel, mask=inside, other=0).to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    scale = tl.load((start + width).to(tl.pointer_type(tl.float32)) + 0 * channel, mask=inside, other=0.0)
    return values * scale

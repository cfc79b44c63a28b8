"""Packed rows: activations in fewer bytes than the model computes with. Code that keeps or moves them sees bytes; the
kernels that gather rows unpack them on the way.

`fp8` and `int4` know their own layout; this module chooses between them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instgenie.kernels import fp8, int4
from instgenie.kernels.fp8 import load_fp8
from instgenie.kernels.int4 import load_int4
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton
from instgenie.types import CacheDtype

LAYOUTS: dict[CacheDtype, Any] = {"fp8": fp8, "int4": int4}
NUMBERS: dict[CacheDtype, int] = {"model": 0, "fp8": 1, "int4": 2}  # as kernels know them


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows as they are kept, to be unpacked where they are read."""

    rows: Tensor  # [parts, tokens, bytes]
    dtype: CacheDtype


def is_packed(dtype: CacheDtype) -> bool:
    return dtype in LAYOUTS


def pack_rows(rows: Tensor, dtype: CacheDtype) -> Tensor:
    """[..., width] -> [..., bytes]"""
    packed: Tensor = LAYOUTS[dtype].pack_rows(rows)
    return packed


def row_size(width: int, dtype: CacheDtype) -> int:
    """The last dimension of rows as they are kept."""
    return LAYOUTS[dtype].row_bytes(width) if is_packed(dtype) else width


def unpacked_shape(packed: Tensor, dtype: CacheDtype) -> tuple[int, ...]:
    return (*packed.shape[:-1], LAYOUTS[dtype].row_width(packed.shape[-1]))


def unpack_rows(packed: Tensor, out: Tensor, dtype: CacheDtype) -> None:
    """Unpack rows [..., bytes] into out [..., width]."""
    run = unpack_rows_fused if runs_fused(out) else unpack_rows_reference
    run(packed, out, dtype)


def unpack_rows_reference(packed: Tensor, out: Tensor, dtype: CacheDtype) -> None:
    LAYOUTS[dtype].unpack_rows_reference(packed, out)


def unpacked(packed: Tensor, dtype: CacheDtype, out_dtype: torch.dtype) -> Tensor:
    """Unpack rows into new memory."""
    out = torch.empty(unpacked_shape(packed, dtype), dtype=out_dtype, device=packed.device)
    unpack_rows(packed, out, dtype)
    return out


def unpack_rows_fused(packed: Tensor, out: Tensor, dtype: CacheDtype) -> None:
    width = out.shape[-1]
    assert packed.is_contiguous()
    assert out.is_contiguous()
    assert packed.shape == (*out.shape[:-1], row_size(width, dtype))
    num_rows = out.numel() // width
    if num_rows:
        unpack_kernel[(num_rows,)](
            packed, out, width=width, block=power_of_two(width), packing=NUMBERS[dtype], num_warps=4
        )


@triton.jit()
def unpack_kernel(  # type: ignore[no-untyped-def]
    packed, out, width: tl.constexpr, block: tl.constexpr, packing: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    values = load_packed(packed, row, channel, inside, width, packing)
    tl.store(out + row * width + channel, values.to(out.dtype.element_ty), mask=inside)


@triton.jit()
def load_packed(rows, row, channel, inside, width: tl.constexpr, packing: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of packed rows at the address `rows`, in float32."""
    if packing == 1:
        values = load_fp8(rows, row, channel, inside, width)
    else:
        values = load_int4(rows, row, channel, inside, width)
    return values

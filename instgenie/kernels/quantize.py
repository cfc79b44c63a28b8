"""Products of low precision: rows in eight-bit floats (e4m3), each with a scale, times weights in e4m3, one scale per
output channel.

A row is scaled so that its largest value becomes the largest e4m3 value. Kernels that write the input of a product
write it as such rows if the product asks for them (`store_fp8`); where no kernel of ours writes the input,
`quantize_rows` is a launch of its own. A row with a value that is no finite number gives a product of none.
"""

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from instgenie.kernels.fp8 import E4M3, LARGEST
from instgenie.kernels.switch import num_warps, power_of_two, runs_fused, tl, triton

MIN_CAPABILITY = (8, 9)  # of a GPU that multiplies in fp8
MULTIPLE = 16  # of the channels on both sides of a product
SMALLEST_SCALE = 1e-12  # of rows of zeros
LONGEST_FAST_SUM = 4096  # channels; fast accumulation keeps about 14 bits, too few for the sums of wider rows


@dataclass(frozen=True, eq=False)
class Fp8Rows:
    """Rows as a product of low precision reads them: values times scale."""

    values: Tensor  # [rows, width], e4m3
    scale: Tensor  # [rows, 1], float32


Rows: TypeAlias = Tensor | Fp8Rows  # the input of a product


def as_tensor(rows: Rows, dtype: torch.dtype) -> Tensor:
    """Rows as numbers of a dtype; those of low precision are multiplied by their scales."""
    return rows if isinstance(rows, Tensor) else (rows.values.float() * rows.scale).to(dtype)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize_rows(x: Tensor) -> Fp8Rows:
    """[rows, width]"""
    run = quantize_rows_fused if runs_fused(x) else quantize_rows_reference
    return run(x)


def scaled_product(rows: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[rows, outputs] from weights [outputs, width] in e4m3 with their scales [outputs]."""
    run = scaled_product_fused if multiplies_fp8(weight.device) else scaled_product_reference
    return run(rows, weight, scale, bias, dtype)


def quantize_rows_reference(x: Tensor) -> Fp8Rows:
    values = x.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return Fp8Rows((values / scale).to(E4M3), scale)


def scaled_product_reference(
    rows: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    product = rows.values.float() @ weight.float().t() * rows.scale * scale
    return (product if bias is None else product + bias.float()).to(dtype)


def quantize_rows_fused(x: Tensor) -> Fp8Rows:
    num_rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = empty_fp8(x.shape, x.device)
    if num_rows:
        quantize_kernel[(num_rows,)](
            x, out.values, out.scale, x.stride(0), width=width, block=power_of_two(width), num_warps=num_warps(width)
        )
    return out


def scaled_product_fused(
    rows: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if not len(rows.values):
        return rows.scale.new_empty(0, len(weight), dtype=dtype)
    return torch._scaled_mm(
        rows.values, weight.t(), scale_a=rows.scale, scale_b=scale[None], bias=bias, out_dtype=dtype,
        use_fast_accum=rows.values.shape[1] <= LONGEST_FAST_SUM,
    )  # fmt: skip


def empty_fp8(shape: torch.Size | tuple[int, int], device: torch.device) -> Fp8Rows:
    """Rows of the shape [rows, width] for a kernel to write."""
    num_rows, width = shape
    return Fp8Rows(
        torch.empty(num_rows, width, dtype=E4M3, device=device),
        torch.empty(num_rows, 1, dtype=torch.float32, device=device),
    )


@triton.jit()
def quantize_kernel(x, values, scale, stride, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, block)
    inside = channel < width
    store_fp8(values, scale, row, channel, inside, tl.load(x + row * stride + channel, mask=inside, other=0.0), width)


@triton.jit()
def store_fp8(values, scale, row, channel, inside, value, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a whole row, of which `value` is 0 outside, and its scale."""
    value = value.to(tl.float32)
    unit = scale_of(tl.max(tl.abs(value)))
    tl.store(scale + row, unit)
    tl.store(values + row * width + channel, (value / unit).to(values.dtype.element_ty), mask=inside)


@triton.jit()
def scale_of(largest):  # type: ignore[no-untyped-def]
    """The scale of a row with this largest size of a value. 448 is the largest e4m3 value."""
    return tl.maximum(largest / 448.0, 1e-12)

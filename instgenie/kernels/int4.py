"""Rows in 5/16 of the bytes of bfloat16: four bits a value, in groups of 32 values with a minimum and a scale.

    [width / 2 bytes of values | a word of four bytes per group: its minimum, then its scale, both bfloat16]

Byte j holds value j in its low bits and value j + width / 2 in its high bits, so that a kernel that unpacks a row
writes two contiguous halves. A value is minimum + scale * bits. The minimum is rounded down and the scale up, so no
value is further than half a scale from what is read. A group with a value that is no finite number has no scale, so
that none of it is read as a number.
"""

import torch
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

GROUP = 32  # values that share a minimum and a scale
LARGEST = 15  # of four bits
NAN = 0x7FC0  # the bits of a bfloat16


def row_bytes(width: int) -> int:
    """Bytes of a row of so many values."""
    return width // 2 + 4 * num_groups(width)


def row_width(num_bytes: int) -> int:
    """Values of a row of so many bytes."""
    return 2 * (num_bytes - 4 * (-(-num_bytes // 20)))  # a whole group has 20 bytes


def num_groups(width: int) -> int:
    return -(-width // GROUP)


def pack_rows(rows: Tensor) -> Tensor:
    """[..., width] -> [..., bytes]"""
    run = pack_rows_fused if runs_fused(rows) else pack_rows_reference
    return run(rows)


def pack_rows_reference(rows: Tensor) -> Tensor:
    width = rows.shape[-1]
    assert width % 8 == 0, width
    values = torch.nn.functional.pad(rows.float(), (0, -width % GROUP), mode="constant", value=torch.nan)
    groups = values.unflatten(-1, (-1, GROUP))
    low_bits = round_down(groups.nan_to_num(torch.inf).amin(dim=-1))
    low = widened(low_bits)
    high = groups.nan_to_num(-torch.inf).amax(dim=-1)
    has_no_number = ~rows_finite(groups, width)
    scale_bits = round_up((high - low) / LARGEST).masked_fill(has_no_number, NAN)
    scale = widened(scale_bits)
    steps = (groups - low[..., None]) / scale.where(scale > 0, 1.0)[..., None]
    bits = (steps + 0.5).floor().nan_to_num(0.0).clamp(0, LARGEST).to(torch.uint8).flatten(-2)[..., :width]
    first, second = bits.split(width // 2, dim=-1)
    words = (scale_bits << 16) | low_bits
    return torch.cat([first | (second << 4), words.contiguous().view(torch.uint8)], dim=-1)


def rows_finite(groups: Tensor, width: int) -> Tensor:
    """Per group, whether all its values are finite; what fills up the last group does not count."""
    is_filled = torch.arange(groups.shape[-2] * GROUP, device=groups.device).view(-1, GROUP) >= width
    return (groups.isfinite() | is_filled).all(dim=-1)


def round_down(values: Tensor) -> Tensor:
    """The upper half of the bits of each float32, as an int32: a bfloat16 that is no larger than the value."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + ((bits >> 31) & 0xFFFF)) >> 16) & 0xFFFF


def round_up(values: Tensor) -> Tensor:
    """The same for values of at least 0, and no smaller than the value."""
    return (values.contiguous().view(torch.int32) + 0xFFFF) >> 16


def widened(bits: Tensor) -> Tensor:
    """The float32 of a bfloat16's bits."""
    return (bits << 16).view(torch.float32)


def unpack_rows_reference(packed: Tensor, out: Tensor) -> None:
    width = out.shape[-1]
    half = width // 2
    words = packed[..., half:].contiguous().view(torch.int32)
    low, scale = widened(words & 0xFFFF), (words & -0x10000).view(torch.float32)
    values = packed[..., :half]
    bits = torch.cat([values & 15, values >> 4], dim=-1).float()
    low, scale = (one.repeat_interleave(GROUP, dim=-1)[..., :width] for one in (low, scale))
    out.copy_(low + scale * bits)


def pack_rows_fused(rows: Tensor) -> Tensor:
    width = rows.shape[-1]
    assert width % 8 == 0, width
    given = rows.contiguous()
    packed = given.new_empty(*rows.shape[:-1], row_bytes(width), dtype=torch.uint8)
    num_rows = given.numel() // max(width, 1)
    if num_rows:
        pack_kernel[(num_rows,)](
            given, packed, packed.view(torch.int32),
            width=width, num_groups=num_groups(width), some_groups=power_of_two(num_groups(width)), num_warps=4,
        )  # fmt: skip
    return packed


@triton.jit()
def pack_kernel(  # type: ignore[no-untyped-def]
    rows, packed, words, width: tl.constexpr, num_groups: tl.constexpr, some_groups: tl.constexpr
):
    """One program per row. A byte holds values of two groups, so the bounds of all groups are found and written first,
    and the values are read once more."""
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = width // 2 + 4 * num_groups
    group = tl.arange(0, some_groups)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = channel < width
    values = tl.load(rows + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, values, float("inf")), axis=1)
    high = tl.max(tl.where(inside, values, float("-inf")), axis=1)
    low_bits = low.to(tl.int32, bitcast=True)
    low_bits = ((low_bits + tl.where(low_bits < 0, 0xFFFF, 0)) >> 16) & 0xFFFF
    low = (low_bits << 16).to(tl.float32, bitcast=True)
    scale_bits = (((high - low) / 15).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    is_finite = tl.min(tl.where(tl.abs(values) < float("inf"), 1, 0), axis=1) > 0
    scale_bits = tl.where(is_finite, scale_bits, 0x7FC0)
    at = row * (size // 4) + width // 8 + group
    tl.store(words + at, (scale_bits << 16) | low_bits, mask=group < num_groups)
    tl.debug_barrier()
    byte = tl.arange(0, some_groups * 16)
    first = find_bits(rows, words, row, byte, byte < width // 2, width, num_groups)
    second = find_bits(rows, words, row, byte + width // 2, byte < width // 2, width, num_groups)
    tl.store(packed + row * size + byte, (first | (second << 4)).to(tl.uint8), mask=byte < width // 2)


@triton.jit()
def find_bits(rows, words, row, channel, inside, width: tl.constexpr, num_groups: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four bits of each value, as int32."""
    size: tl.constexpr = width // 2 + 4 * num_groups
    values = tl.load(rows + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    word = tl.load(words + row * (size // 4) + width // 8 + channel // 32, mask=inside, other=0)
    low = (word << 16).to(tl.float32, bitcast=True)
    scale = (word & -0x10000).to(tl.float32, bitcast=True)
    steps = tl.floor((values - low) / tl.where(scale > 0, scale, 1.0) + 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), 15.0).to(tl.int32)


@triton.jit()
def load_int4(rows, row, channel, inside, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a row at `rows`, in float32."""
    half: tl.constexpr = width // 2
    start = rows + row * (half + 4 * ((width + 31) // 32))
    is_second = channel >= half
    byte = tl.load(start + tl.where(is_second, channel - half, channel), mask=inside, other=0).to(tl.int32)
    bits = tl.where(is_second, byte >> 4, byte & 15)
    word = tl.load((start + half).to(tl.pointer_type(tl.int32)) + channel // 32, mask=inside, other=0)
    low = (word << 16).to(tl.float32, bitcast=True)
    scale = (word & -0x10000).to(tl.float32, bitcast=True)
    return low + scale * bits.to(tl.float32)

"""Stores rows of activations where later steps read them."""

from collections.abc import Sequence

from torch import Tensor

from instgenie.kernels.addresses import Address, look_up_values
from instgenie.kernels.switch import runs_fused, tl, triton

BLOCK = 4096  # values that one program copies


def store_rows(parts: Sequence[Tensor], target: Tensor | Address) -> None:
    """Copy the parts, each [tokens, width], to the contiguous target [parts, tokens, width]."""
    if isinstance(target, Address) and runs_fused(parts[0]):
        store_rows_fused(parts, target)
    else:
        store_rows_reference(parts, target)


def store_rows_reference(parts: Sequence[Tensor], target: Tensor | Address) -> None:
    num_tokens, width = parts[0].shape
    whole = look_up_values(target, (len(parts), num_tokens, width), parts[0].dtype)
    for room, part in zip(whole, parts, strict=True):
        room.copy_(part)


def store_rows_fused(parts: Sequence[Tensor], target: Address) -> None:
    """The address is read when the kernel runs, so that a captured graph stores elsewhere each time."""
    for number, part in enumerate(parts):
        rows, num_values = part.contiguous(), part.numel()
        store_kernel[(-(-num_values // BLOCK),)](
            rows, target.table, number * num_values, num_values, block=BLOCK, num_warps=4
        )


@triton.jit()
def store_kernel(source, table, offset, num_values, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per block of values."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < num_values
    target = tl.multiple_of(tl.load(table).to(source.dtype), 16)
    tl.store(target + offset + place, tl.load(source + place, mask=inside), mask=inside)

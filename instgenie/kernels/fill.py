"""Completes pictures: rows of the tokens that flow and, between them, rows of activations for those that do not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from instgenie.kernels.addresses import Addresses, RowSources, look_up_values
from instgenie.kernels.packed import NUMBERS, PackedRows, load_packed, row_size
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton
from instgenie.types import CacheDtype


def fill_rows(sources: RowSources, origin: Tensor, flowing: Sequence[Tensor], out: Tensor) -> None:
    """Fill out [parts, branches, tokens, width]. Where origin [branches, tokens] is at least 0, it is the row to take
    from flowing (per part: [flowing tokens, width]); elsewhere the row at the same place of the branch's source [parts,
    tokens, width] is taken, unpacked where it is packed. Rows of a branch without a source are left as they are, or
    uninitialised."""
    run = fill_rows_fused if runs_fused(out) else fill_rows_reference
    run(sources, origin, flowing, out)


def fill_rows_reference(sources: RowSources, origin: Tensor, flowing: Sequence[Tensor], out: Tensor) -> None:
    num_parts, num_branches, *shape = out.shape
    for branch in range(num_branches):
        whole, source = out[:, branch], sources[branch]
        flows = origin[branch] >= 0
        if isinstance(source, Tensor) or (source is not None and not flows.all()):
            num_tokens, width = shape
            whole.copy_(look_up_values(source, (num_parts, num_tokens, width), out.dtype))
        for part, rows in zip(whole, flowing, strict=True):
            torch.where(flows[:, None], rows[origin[branch].clamp(min=0)], part, out=part)


def fill_rows_fused(sources: RowSources, origin: Tensor, flowing: Sequence[Tensor], out: Tensor) -> None:
    num_parts, num_branches, num_tokens, width = out.shape
    first, *others = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in flowing)
    assert {rows.stride(0) for rows in others} <= {first.stride(0)}
    assert (len(others) + 1, origin.shape) == (num_parts, (num_branches, num_tokens))
    assert origin.is_contiguous()
    assert out.is_contiguous()
    block = power_of_two(width)
    rows_at_once = max(4096 // block, 1)

    def launch(source: Tensor, first_branch: int, num: int, by_address: bool, dtype: CacheDtype = "model") -> None:
        fill_kernel[(-(-num_tokens // rows_at_once), num)](
            source, origin, first, others[0] if others else first, out, first_branch, num_branches, num_tokens,
            stride=first.stride(0), num_parts=num_parts, width=width, block=block, rows_at_once=rows_at_once,
            by_address=by_address, packing=NUMBERS[dtype], is_aligned=row_size(width, dtype) % 16 == 0, num_warps=4,
        )  # fmt: skip

    if isinstance(sources, Addresses):
        if len(set(sources.dtypes)) <= 1:
            launch(sources.table, 0, num_branches, by_address=True, dtype=sources.dtype(0))
            return
        for branch in range(num_branches):
            launch(sources.table, branch, 1, by_address=True, dtype=sources.dtype(branch))
        return
    for branch, source in enumerate(sources):
        if isinstance(source, PackedRows):
            assert source.rows.is_contiguous()
            assert source.rows.shape == (num_parts, num_tokens, row_size(width, source.dtype))
            launch(source.rows, branch, 1, by_address=False, dtype=source.dtype)
        else:
            assert source is None or (isinstance(source, Tensor) and source.is_contiguous())
            launch(out if source is None else source, branch, 1, by_address=False)


@triton.jit()
def fill_kernel(  # type: ignore[no-untyped-def]
    source, origin, first, second, out, first_branch, num_branches, num_tokens,
    stride: tl.constexpr, num_parts: tl.constexpr, width: tl.constexpr, block: tl.constexpr, rows_at_once: tl.constexpr,
    by_address: tl.constexpr, packing: tl.constexpr, is_aligned: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens of a branch, for all parts."""
    branch = (first_branch + tl.program_id(1)).to(tl.int64)
    token = (tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once)).to(tl.int64)[:, None]
    channel = tl.arange(0, block)[None, :]
    inside = (token < num_tokens) & (channel < width)
    taken = tl.load(origin + branch * num_tokens + token, mask=token < num_tokens, other=0).to(tl.int64)
    flows = taken >= 0
    rows = source
    if by_address and packing:
        rows = tl.load(source + branch).to(tl.pointer_type(tl.uint8))
        if is_aligned:  # several values are read at once
            rows = tl.multiple_of(rows, 16)
    elif by_address:
        rows = tl.multiple_of(tl.load(source + branch).to(out.dtype), 16)
    for part in tl.static_range(num_parts):
        flowing = first if part == 0 else second
        value = tl.load(flowing + taken * stride + channel, mask=inside & flows, other=0.0)
        at = part * num_tokens + token
        if packing:
            rest = load_packed(rows, at, channel, inside & (taken < 0), width, packing).to(out.dtype.element_ty)
        else:
            rest = tl.load(rows + at * width + channel, mask=inside & (taken < 0), other=0.0)
        to = out + ((part * num_branches + branch) * num_tokens + token) * width + channel
        tl.store(to, tl.where(flows, value, rest), mask=inside)

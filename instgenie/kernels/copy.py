"""Copies chosen rows of activations from page-locked memory to a device; the device itself reads them."""

import torch
from torch import Tensor

from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton

NUM_PROGRAMS = 16  # enough to fill the bus, while the other multiprocessors go on computing
NUM_WORDS = 4096  # words of four bytes that one program has in flight


def can_copy_rows(source: Tensor, out: Tensor) -> bool:
    """True if the device can read the rows where they are."""
    return runs_fused(out) and source.shape[2] * source.element_size() % 4 == 0 and source.is_pinned()


def copy_rows_reference(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy the rows of source [parts, rows, width] at the index [chosen] to the same rows of out [parts, rows, width];
    its other rows stay as they are."""
    chosen = index.to(source.device)
    out[:, index] = source[:, chosen].to(out.device)


def copy_rows_fused(source: Tensor, index: Tensor, out: Tensor) -> None:
    num_parts, num_rows, _ = source.shape
    assert source.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == source.shape
    if not len(index):
        return
    given, taken = source.view(torch.int32), out.view(torch.int32)
    num_words = given.shape[2]
    block = power_of_two(num_words)
    copy_kernel[(NUM_PROGRAMS,)](
        given, index, taken, len(index), num_parts * len(index), num_rows,
        num_words=num_words, block=block, rows_at_once=max(NUM_WORDS // block, 1), num_programs=NUM_PROGRAMS,
        num_warps=8,
    )  # fmt: skip


@triton.jit()
def copy_kernel(  # type: ignore[no-untyped-def]
    source, index, out, num_chosen, num_copied, num_rows,
    num_words: tl.constexpr, block: tl.constexpr, rows_at_once: tl.constexpr, num_programs: tl.constexpr,
):  # fmt: skip
    """A few programs take turns, each copying a few rows of any part at a time."""
    word = tl.arange(0, block)[None, :]
    start = tl.program_id(0) * rows_at_once
    while start < num_copied:
        place = start + tl.arange(0, rows_at_once)
        chosen = tl.load(index + place % num_chosen, mask=place < num_copied, other=0)
        row = (place // num_chosen).to(tl.int64) * num_rows + chosen
        inside = (place < num_copied)[:, None] & (word < num_words)
        at = row[:, None] * num_words + word
        tl.store(out + at, tl.load(source + at, mask=inside), mask=inside)
        start += num_programs * rows_at_once

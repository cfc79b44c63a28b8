"""Takes rows in lists: tiles with their halo from rows that flow, and from activations where these do not.

One index says for every entry of a list where its row comes from, so one kernel gathers tiles for a convolution, brings
them to another level, fills gaps with activations, and puts tiles back into the order of a picture.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from instgenie.kernels.addresses import Addresses, RowSource, RowSources, look_up_values
from instgenie.kernels.packed import NUMBERS, PackedRows, load_packed, row_size
from instgenie.kernels.switch import power_of_two, runs_fused, tl, triton
from instgenie.types import CacheDtype

BLOCK_ROWS, BLOCK_CHANNELS = 16, 128
NOTHING = -1  # an entry of an index: a row of zeros
FIRST_KEPT = -2  # an entry of an index: the first row of the source; the second is one less, and so on


def take_rows(
    rows: Tensor,
    index: Tensor,
    owners: Tensor,
    columns: Tensor | None = None,
    activates: bool = False,
    sources: RowSources | None = None,
) -> Tensor:
    """Take lists of rows [lists, entries, width]. An entry of the index [lists, entries] that is at least 0 is a row of
    `rows` [rows, width]; `NOTHING` is a row of zeros; `FIRST_KEPT - n` is row n of the source [1, rows, width] of the
    picture that owns the list, by `owners` [lists]. With columns [pictures, 2, width], a scale and a shift are applied
    to what comes from `rows`, and SiLU if it activates."""
    run = take_rows_fused if runs_fused(rows) else take_rows_reference
    return run(rows, index, owners, columns, activates, sources)


def take_rows_reference(
    rows: Tensor, index: Tensor, owners: Tensor, columns: Tensor | None, activates: bool, sources: RowSources | None
) -> Tensor:
    taken = rows[index.clamp(min=0)]
    if columns is not None:
        scale, shift = columns[owners][:, :, None].unbind(1)
        taken = (taken * scale + shift).to(rows.dtype)
    taken = F.silu(taken) if activates else taken
    taken = torch.where((index >= 0)[:, :, None], taken, 0)
    for picture in owners.unique().tolist() if sources is not None else ():
        assert sources is not None
        source = sources[picture]
        lists = (owners == picture).nonzero()[:, 0]
        kept = FIRST_KEPT - index[lists]
        if source is not None and (kept >= 0).any():
            values = look_up_values(source, (1, int(kept.max()) + 1, rows.shape[1]), rows.dtype)[0]
            own = taken[lists]
            taken[lists] = torch.where((kept >= 0)[:, :, None], values[kept.clamp(min=0)], own)
    return taken


def take_rows_fused(
    rows: Tensor, index: Tensor, owners: Tensor, columns: Tensor | None, activates: bool, sources: RowSources | None
) -> Tensor:
    rows, index = rows.contiguous(), index.contiguous()
    (num_lists, num_entries), width = index.shape, rows.shape[1]
    out = rows.new_empty(num_lists, num_entries, width)
    table, packing = find_table(sources, rows.device) if sources is not None else (index, "model")
    block_rows, block_channels = min(power_of_two(num_entries), BLOCK_ROWS), min(power_of_two(width), BLOCK_CHANNELS)
    if out.numel():
        grid = num_lists, -(-num_entries // block_rows), -(-width // block_channels)
        take_kernel[grid](
            rows, index, owners, rows if columns is None else columns, table, out, num_entries,
            width=width, block_rows=block_rows, block_channels=block_channels, has_columns=columns is not None,
            activates=activates, has_sources=sources is not None, packing=NUMBERS[packing],
            is_aligned=row_size(width, packing) % 16 == 0, num_warps=4,
        )  # fmt: skip
    return out


def find_table(sources: RowSources, device: torch.device) -> tuple[Tensor, CacheDtype]:
    """The addresses of all sources [pictures], and in which format their rows are kept."""
    if isinstance(sources, Addresses):
        assert len(set(sources.dtypes)) <= 1
        return sources.table, sources.dtype(0)
    found = [address_of(source) for source in sources]
    formats = {dtype for address, dtype in found if address}
    assert len(formats) <= 1
    table = torch.tensor([address for address, _ in found], dtype=torch.int64)
    table = table.pin_memory() if device.type == "cuda" else table
    return table.to(device, non_blocking=True), next(iter(formats), "model")


def address_of(source: RowSource) -> tuple[int, CacheDtype]:
    if source is None:
        return 0, "model"
    if isinstance(source, PackedRows):
        assert source.rows.is_contiguous()
        return source.rows.data_ptr(), source.dtype
    assert isinstance(source, Tensor)
    assert source.is_contiguous()
    return source.data_ptr(), "model"


@triton.jit()
def take_kernel(  # type: ignore[no-untyped-def]
    rows, index, owners, columns, table, out, num_entries,
    width: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr, has_columns: tl.constexpr,
    activates: tl.constexpr, has_sources: tl.constexpr, packing: tl.constexpr, is_aligned: tl.constexpr,
):  # fmt: skip
    """One program per block of entries of a list and block of channels."""
    at = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * block_rows + tl.arange(0, block_rows)[:, None]
    channel = tl.program_id(2) * block_channels + tl.arange(0, block_channels)[None, :]
    listed = entry < num_entries
    inside = listed & (channel < width)
    taken = tl.load(index + at * num_entries + entry, mask=listed, other=-1).to(tl.int64)
    picture = tl.load(owners + at)
    flows = inside & (taken >= 0)
    value = tl.load(rows + taken * width + channel, mask=flows, other=0.0).to(tl.float32)
    if has_columns:
        of = columns + picture * 2 * width + channel
        scale = tl.load(of, mask=channel < width, other=0.0)
        shift = tl.load(of + width, mask=channel < width, other=0.0)
        value = value * scale + shift
    if activates:
        value = value * tl.sigmoid(value)
    value = tl.where(flows, value, 0.0)
    if has_sources:
        is_kept = inside & (taken <= -2)
        kept = tl.where(taken <= -2, -2 - taken, 0)
        if packing:
            # the scale of the first row is read even where no row is: then from memory that is there
            address = tl.load(table + picture)
            packed = tl.where(address == 0, out.to(tl.int64), address).to(tl.pointer_type(tl.uint8))
            if is_aligned:  # several values are read at once
                packed = tl.multiple_of(packed, 16)
            value = tl.where(is_kept, load_packed(packed, kept, channel, is_kept, width, packing), value)
        else:
            source = tl.multiple_of(tl.load(table + picture).to(out.dtype), 16)
            value += tl.load(source + kept * width + channel, mask=is_kept, other=0.0).to(tl.float32)
    to = out + (at * num_entries + entry) * width + channel
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)

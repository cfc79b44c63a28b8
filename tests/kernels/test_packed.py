"""Packed rows: what is lost, and kernels that unpack them against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instgenie.kernels import fp8, int4
from instgenie.kernels.addresses import Address, Addresses
from instgenie.kernels.fill import fill_rows_fused, fill_rows_reference
from instgenie.kernels.gather import gather_rows_fused, gather_rows_reference
from instgenie.kernels.packed import PackedRows, pack_rows, row_size, unpack_rows, unpack_rows_fused, unpacked_shape
from instgenie.kernels.store import store_rows_fused, store_rows_reference
from instgenie.types import CacheDtype

PACKED: tuple[CacheDtype, ...] = ("fp8", "int4")


def packed_values(device: str, dtype: torch.dtype, width: int, packing: CacheDtype) -> tuple[Tensor, Tensor]:
    """Packed rows [2, 24, bytes] and what the reference reads from them."""
    torch.manual_seed(0)
    values = (torch.randn(2, 24, width) * torch.logspace(-3, 3, 24)[:, None]).to(device, dtype)
    rows = pack_rows(values, packing)
    read = torch.empty_like(values)
    unpack_rows(rows, read, packing)
    return rows, read


def equal(found: Tensor, expected: Tensor) -> bool:
    """Exactly, but for the interpreter, which truncates where a GPU rounds."""
    if found.is_cuda or found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    return torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("width", [16, 72, 3072])
def test_unpacking_is_exact(device: str, dtype: torch.dtype, width: int) -> None:
    """Every value of eight bits, and the smallest and largest rows."""
    torch.manual_seed(0)
    values = torch.randn(2, 40, width) * torch.logspace(-6, 4, 40)[:, None]
    values[0, 3] = 0
    rows = fp8.pack_rows(values.to(device, dtype))
    assert rows.shape[2] == width + fp8.NUM_SCALE_BYTES
    bits = torch.arange(256).repeat(-(-width // 256))[:width]
    rows[1, 5, :width] = bits[bits % 128 != 127].repeat(2)[:width].to(device)
    found, expected = torch.zeros(2, 2, 40, width, device=device, dtype=dtype)
    unpack_rows_fused(rows, found, "fp8")
    fp8.unpack_rows_reference(rows, expected)
    if device == "cuda" or dtype == torch.float32:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found.double(), expected.double(), rtol=2**-7, atol=1e-5)  # it truncates
    assert found[1, 5].abs().max() > 0


@pytest.mark.parametrize("width", [16, 72, 3072])
def test_four_bits_are_packed_and_unpacked_as_by_the_reference(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    values = (torch.randn(2, 24, width) * torch.logspace(-6, 4, 24)[:, None]).to(device, dtype)
    values[0, 3] = 0
    found, expected = int4.pack_rows_fused(values), int4.pack_rows_reference(values)
    assert torch.equal(found[..., width // 2 :], expected[..., width // 2 :])  # minima and scales
    low, high = ((rows[..., : width // 2] & 15, rows[..., : width // 2] >> 4) for rows in (found, expected))
    assert max(int((one.int() - other.int()).abs().max()) for one, other in zip(low, high, strict=True)) <= 1
    read, truth = torch.empty_like(values), torch.empty_like(values)
    unpack_rows_fused(expected, read, "int4")
    int4.unpack_rows_reference(expected, truth)
    assert equal(read, truth)


@pytest.mark.parametrize("width", [16, 72, 640])
@pytest.mark.parametrize("packing", PACKED)
def test_gathering_unpacks(device: str, dtype: torch.dtype, width: int, packing: CacheDtype) -> None:
    rows, read = packed_values(device, dtype, width, packing)
    index = torch.tensor([0, 3, 3, 23], device=device)
    places = torch.tensor([5, 1, 1, 0], device=device)
    address = Address(torch.tensor([rows.data_ptr()], device=device), packing)
    for source in (PackedRows(rows, packing), address):
        found = torch.zeros(2, 4, width, device=device, dtype=dtype)
        gather_rows_fused(source, index, 24, found)
        assert equal(found, read[:, index])
        placed = torch.zeros(2, 6, width, device=device, dtype=dtype)
        gather_rows_fused(source, index, 24, placed, places)
        assert equal(placed[:, places], read[:, index])
        assert not placed[:, 2:5].any()


@pytest.mark.parametrize("width", [16, 72, 640])
@pytest.mark.parametrize("packing", PACKED)
def test_filling_unpacks(device: str, dtype: torch.dtype, width: int, packing: CacheDtype) -> None:
    rows, read = packed_values(device, dtype, width, packing)
    origin = torch.full((2, 24), -1, device=device)
    origin[0, ::3], origin[1, 5] = torch.arange(8, device=device), 9
    flowing = [torch.randn(10, width, device=device, dtype=dtype) for _ in range(2)]
    expected = torch.zeros(2, 2, 24, width, device=device, dtype=dtype)
    fill_rows_reference([read, read], origin, flowing, expected)
    table = torch.tensor([rows.data_ptr()] * 2, device=device)
    for sources in ([PackedRows(rows, packing), read], Addresses(table, (packing, packing))):
        found = torch.zeros_like(expected)
        fill_rows_fused(sources, origin, flowing, found)
        assert equal(found, expected)
    mixed = Addresses(torch.tensor([rows.data_ptr(), read.data_ptr()], device=device), (packing, "model"))
    fill_rows_fused(mixed, origin, flowing, found)
    assert equal(found, expected)


@pytest.mark.parametrize("num_tokens", [3, 4096])
@pytest.mark.parametrize("width", [16, 72, 640])
def test_rows_are_stored_where_a_table_says(device: str, dtype: torch.dtype, width: int, num_tokens: int) -> None:
    """The address is read when the kernel runs; rows that are not contiguous are stored as such."""
    torch.manual_seed(0)
    wide = torch.randn(num_tokens, 2 * width, device=device, dtype=dtype)
    parts = wide.chunk(2, dim=1)
    rooms = torch.zeros(2, 2, num_tokens, width, device=device, dtype=dtype)
    table = torch.tensor([rooms[0].data_ptr()], device=device)
    store_rows_fused(parts, Address(table, "model"))
    table.fill_(rooms[1].data_ptr())
    store_rows_fused([part + 1 for part in parts], Address(table, "model"))
    expected = torch.zeros_like(rooms[0])
    store_rows_reference(parts, expected)
    assert torch.equal(rooms[0], expected)
    assert torch.equal(rooms[1], expected + 1)


@pytest.mark.parametrize("packing", PACKED)
def test_references_read_packed_rows_as_they_read_unpacked_ones(packing: CacheDtype) -> None:
    rows, read = packed_values("cpu", torch.float32, 72, packing)
    index, origin = torch.tensor([0, 23]), torch.full((1, 24), -1)
    flowing = [torch.randn(1, 72) for _ in range(2)]
    origin[0, 7] = 0
    address = torch.tensor([rows.data_ptr()])
    for source, sources in (
        (PackedRows(rows, packing), [PackedRows(rows, packing)]),
        (Address(address, packing), Addresses(address, (packing,))),
    ):
        found, expected = torch.zeros(2, 2, 2, 72)
        gather_rows_reference(source, index, 24, found)
        gather_rows_reference(read, index, 24, expected)
        assert torch.equal(found, expected)
        found, expected = torch.zeros(2, 2, 1, 24, 72)
        fill_rows_reference(sources, origin, flowing, found)
        fill_rows_reference([read], origin, flowing, expected)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [16, 72])
def test_packed_rows_are_within_a_sixteenth(width: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 9, width) * torch.logspace(-6, 4, 9)[:, None]
    rows[1, 4] = 0
    found = torch.empty_like(rows)
    unpack_rows(fp8.pack_rows(rows), found, "fp8")
    smallest = rows.abs().amax(dim=2, keepdim=True) / fp8.LARGEST * 2**-9  # the smallest step of e4m3
    assert ((found - rows).abs() <= rows.abs() / 16 + smallest / 2).all()
    assert unpacked_shape(fp8.pack_rows(rows), "fp8") == rows.shape
    assert not found[1, 4].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_packed_row_with_no_number_in_it_is_read_as_none(bad: float) -> None:
    """Neither the value nor its neighbours become numbers; other rows, down to the smallest floats, do."""
    rows = torch.full((1, 3, 16), 1000.0)
    rows[0, 0, 5] = bad
    rows[0, 2] = 1e-45
    found = torch.empty_like(rows)
    kept = fp8.pack_rows(rows)
    unpack_rows(kept, found, "fp8")
    assert found[0, 0].isnan().all()
    assert torch.equal(found[0, 1], rows[0, 1])
    assert not found[0, 2].any()
    bits = kept[..., :16] & 0x7F
    assert not (bits == 0x7F).any()  # the bits of a NaN: a GPU kernel reads them as a number


def groups_of(values: Tensor) -> list[Tensor]:
    return list(values.split(int4.GROUP, dim=-1))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([8, 32, 72, 320]), st.integers(0, 2**31), st.floats(-30, 30), st.floats(-30, 30))
def test_four_bits_are_within_half_a_scale(width: int, seed: int, size: float, offset: float) -> None:
    """The scale is a fifteenth of a group's range, a little more for rounding its minimum and itself to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, width, generator=generator) * 2.0**size + 2.0**offset * torch.sign(torch.tensor(offset))
    kept, found = pack_rows(rows, "int4"), torch.empty_like(rows)
    assert kept.shape == (3, row_size(width, "int4"))
    assert unpacked_shape(kept, "int4") == rows.shape
    unpack_rows(kept, found, "int4")
    for one, other in zip(groups_of(rows), groups_of(found), strict=True):
        low, high = one.amin(dim=-1, keepdim=True), one.amax(dim=-1, keepdim=True)
        scale = (high - low + low.abs() / 64) / 15 * (1 + 2**-6)
        assert ((one - other).abs() <= scale / 2 + one.abs().amax() * 2**-20).all()


def test_four_bits_keep_what_is_equal_and_what_is_exact() -> None:
    rows = torch.tensor([[3.14159] * 32, [0.0] * 32, [float(number % 16) for number in range(32)]])
    found = torch.empty_like(rows)
    unpack_rows(pack_rows(rows, "int4"), found, "int4")
    assert torch.allclose(found[0], rows[0], rtol=2e-3)
    assert torch.equal(found[1:], rows[1:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_of_four_bits_with_no_number_in_it_is_read_as_none(bad: float) -> None:
    rows = torch.arange(64.0).repeat(2, 1)
    rows[0, 40] = bad
    found = torch.empty_like(rows)
    unpack_rows(pack_rows(rows, "int4"), found, "int4")
    assert not found[0, 32:].isfinite().any()
    assert found[0, :32].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("width", range(8, 400, 8))
def test_the_width_of_a_row_follows_from_its_bytes(width: int) -> None:
    assert int4.row_width(int4.row_bytes(width)) == width

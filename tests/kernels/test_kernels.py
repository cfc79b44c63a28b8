"""Kernels against their references in float64: on a GPU if there is one, else in Triton's interpreter if it is on
(TRITON_INTERPRET=1). The laws test the references."""

import copy
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from instgenie.kernels import modulate, rms_modulate, switch
from instgenie.kernels.add import add_bias_fused, add_bias_reference
from instgenie.kernels.addresses import Address, Addresses
from instgenie.kernels.copy import can_copy_rows, copy_rows_fused, copy_rows_reference
from instgenie.kernels.fill import fill_rows_fused, fill_rows_reference
from instgenie.kernels.gather import gather_rows_fused, gather_rows_reference
from instgenie.kernels.geglu import geglu_fused, geglu_reference
from instgenie.kernels.gelu import beside_gelu_fused, beside_gelu_reference
from instgenie.kernels.group_norm import group_norm_fused, group_norm_reference
from instgenie.kernels.heads import HeadPlaces, Heads, Projected, place, place_fused, place_reference
from instgenie.kernels.layer_norm import add_layer_norm_fused, layer_norm_fused, layer_norm_reference
from instgenie.kernels.silu_gate import silu_gate_fused, silu_gate_reference
from instgenie.kernels.swiglu import beside_swiglu_fused, beside_swiglu_reference

SHAPES = [(2, 8), (3, 24), (5, 16), (24, 128)]  # heads, head channels
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # half a unit in the last place of bfloat16


def close(found: Tensor, truth: Tensor) -> None:
    """Within one rounding of each value, plus float32's own. The interpreter truncates where a GPU rounds."""
    rounding = ROUNDING[found.dtype] * (1 if found.is_cuda else 2)
    torch.testing.assert_close(found.double(), truth, rtol=rounding, atol=1e-5)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("width", [16, 72, 3072])
@pytest.mark.parametrize("num_branches", [1, 3])
def test_modulation(device: str, dtype: torch.dtype, width: int, num_branches: int) -> None:
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    x, y = 3 * random(11, width) + 1, random(11, width)
    gate, shift, scale = random(num_branches, 3 * width).split(width, dim=1)
    rows = torch.randint(num_branches, (11,), device=device)
    truth = partial(modulate.norm_modulate_reference, *wide(x, shift, scale), rows, 1e-6)
    close(modulate.norm_modulate_fused(x, shift, scale, rows, 1e-6), truth())
    if num_branches == 1:
        close(modulate.norm_modulate_fused(x, shift, scale, None, 1e-6), truth())
    close(modulate.add_gated_fused(x, gate, y, rows), modulate.add_gated_reference(*wide(x, gate, y), rows))
    other_gate = random(num_branches, 2 * width)[:, width:]  # of another block
    total, normed = modulate.add_norm_modulate_fused(x, other_gate, y, shift, scale, rows, 1e-6)
    assert torch.equal(total, modulate.add_gated_fused(x, other_gate, y, rows))
    close(normed, modulate.norm_modulate_reference(*wide(total, shift, scale), rows, 1e-6))


@pytest.mark.parametrize("width", [16, 72, 3840])
@pytest.mark.parametrize("num_branches", [1, 3])
def test_modulation_with_rms_norms(device: str, dtype: torch.dtype, width: int, num_branches: int) -> None:
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    x, y = 3 * random(11, width) + 1, 2 * random(11, width)
    factor = random(num_branches, 2 * width)[:, width:]
    rows = torch.randint(num_branches, (11,), device=device)
    truth = partial(rms_modulate.rms_modulate_reference, *wide(x, factor), rows, 1e-5)
    close(rms_modulate.rms_modulate_fused(x, factor, rows, 1e-5), truth())
    if num_branches == 1:
        close(rms_modulate.rms_modulate_fused(x, factor, None, 1e-5), truth())
    other_gate = random(num_branches, 3 * width)[:, width : 2 * width]  # of another block
    total = rms_modulate.add_rms_gated_fused(x, other_gate, y, rows, 1e-5)
    close(total, rms_modulate.add_rms_gated_reference(*wide(x, other_gate, y), rows, 1e-5))
    again, normed = rms_modulate.add_rms_modulate_fused(x, other_gate, y, factor, rows, 1e-5, 1e-6)
    assert torch.equal(again, total)
    close(normed, rms_modulate.rms_modulate_reference(*wide(total, factor), rows, 1e-6))


def norm_of(weight: Tensor) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(weight), eps=1e-6, device=weight.device, dtype=weight.dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    return norm


@torch.no_grad()
@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize(("num_heads", "head_channels"), SHAPES)
def test_places(device: str, dtype: torch.dtype, num_heads: int, head_channels: int, has_places: bool) -> None:
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    width = num_heads * head_channels
    q, k, v = random(7, 3 * width + 8)[:, 8:].split(width, dim=1)  # columns of one product
    weights = 1 + 0.3 * random(2, head_channels)
    rotary = torch.polar(torch.ones(9, head_channels // 2), 7 * torch.randn(9, head_channels // 2)).to(device)
    places = HeadPlaces(torch.randperm(9)[:7].to(device), torch.randperm(20)[:7].to(device)) if has_places else None
    num_joint, num_keys = (9, 20) if has_places else (7, 7)

    def run(put: object, dtype: torch.dtype, has_q: bool) -> tuple[Tensor, Tensor]:
        norms = [norm_of(weight.to(dtype)) for weight in weights]
        out = torch.zeros(num_joint, num_heads, head_channels, device=device, dtype=dtype)
        keys = torch.zeros(2, num_keys, num_heads, head_channels, device=device, dtype=dtype)
        tokens = Projected(q.to(dtype) if has_q else None, k.to(dtype), v.to(dtype), *norms)
        put(tokens, rotary if has_places else rotary[:7], places, Heads(out if has_q else None, keys))
        return out, keys

    for has_q in (True, False):
        found, truth = run(place_fused, dtype, has_q), run(place_in_double, torch.float64, has_q)
        for one, other in zip(found, truth, strict=True):
            close(one, other)
        assert found[1].abs().sum() > 1


@torch.no_grad()
@pytest.mark.parametrize("has_places", [True, False])
def test_places_beside_other_heads(device: str, dtype: torch.dtype, has_places: bool) -> None:
    """Rows have room for the heads of another attention; nothing is normalised or rotated."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 7, 48, device=device, dtype=dtype)
    rotary = torch.empty(7, 0, dtype=torch.complex64, device=device)
    order = torch.randperm(7).to(device)

    def run(put: object) -> tuple[Tensor, Tensor]:
        out, keys = (torch.zeros(*shape, 6, 16, device=device, dtype=dtype) for shape in ((7,), (2, 7)))
        places = HeadPlaces(order, order) if has_places else None
        put(Projected(q, k, v, None, None), rotary, places, Heads(out[:, 3:], keys[:, :, 3:]))
        return out, keys

    found, expected = run(place_fused), run(place_reference)
    assert all(map(torch.equal, found, expected))
    assert not found[0][:, :3].any()
    at = order if has_places else torch.arange(7, device=device)
    assert torch.equal(found[1][:, at, 3:].flatten(2), torch.stack([k, v]))


def place_in_double(tokens: Projected, rotary: Tensor, places: HeadPlaces | None, heads: Heads) -> None:
    place_reference(tokens, rotary.to(torch.complex128), places, heads)


@pytest.mark.parametrize("width", [16, 72, 3072])
def test_gathering_is_exact(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    source = torch.randn(3, 2, 30, width, device=device, dtype=dtype)[1]
    index = torch.randperm(30)[:13].to(device)
    found, expected = torch.zeros(2, 2, 20, width, device=device, dtype=dtype)
    gather_rows_fused(source, index, 30, found[:, 4:17])
    gather_rows_reference(source, index, 30, expected[:, 4:17])
    assert torch.equal(found, expected)
    assert torch.equal(found[:, 4:17], source[:, index])
    gather_rows_fused(source, index[:0], 30, found[:, :0])
    places = torch.tensor([*range(11, -1, -1), 15], device=device)
    address = Address(torch.tensor([source.data_ptr()], device=device))
    for one in (source, address):
        gather_rows_fused(one, index, 30, found[:, 2:18], places)
        assert torch.equal(found[:, 2:18][:, places], source[:, index])
    gather_rows_reference(source, index, 30, expected[:, 2:18], places)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [16, 72, 3072])
@pytest.mark.parametrize("num_chosen", [0, 1, 13, 300])
def test_copying_is_exact_and_leaves_other_rows_alone(
    device: str, dtype: torch.dtype, width: int, num_chosen: int
) -> None:
    """From main memory, which is page-locked if there is a GPU."""
    torch.manual_seed(0)
    source = torch.randn(2, 300, width).to(dtype)
    source = source.pin_memory() if device == "cuda" else source
    index = torch.randperm(300)[:num_chosen].to(device)
    found, expected = torch.zeros(2, 2, 300, width, device=device, dtype=dtype)
    copy_rows_fused(source, index, found)
    copy_rows_reference(source, index, expected)
    assert torch.equal(found, expected)
    assert found.any(dim=2).sum() == 2 * num_chosen
    assert can_copy_rows(source, found) is (device == "cuda")


@pytest.mark.filterwarnings(
    "ignore:overflow"
)  # of NumPy, in the interpreter: one over infinity is the zero it should be
@pytest.mark.parametrize("width", [16, 72, 12288])
@pytest.mark.parametrize(
    ("fused", "reference"),
    [(beside_gelu_fused, beside_gelu_reference), (beside_swiglu_fused, beside_swiglu_reference)],
    ids=["gelu", "swiglu"],
)
def test_activations_beside_attended_rows(
    device: str, dtype: torch.dtype, width: int, fused: Callable[..., Tensor], reference: Callable[..., Tensor]
) -> None:
    """Rows of a wider tensor; attended rows of two branches, or none."""
    torch.manual_seed(0)
    x = 4 * torch.randn(5, 24 + width, device=device, dtype=dtype)[:, 24:]
    for num_attended in (0, 40):
        attended = [torch.randn(num, num_attended, device=device, dtype=dtype) for num in (2, 3)]
        found = fused(attended, x)
        close(found, reference(wide(*attended), x.double()))
        assert found[:, :num_attended].equal(torch.cat(attended))


@torch.no_grad()
@pytest.mark.parametrize(("num_channels", "num_groups", "grid"), [(8, 4, (3, 5)), (8, 2, (64, 33)), (320, 32, (5, 8))])
def test_group_norm(device: str, dtype: torch.dtype, num_channels: int, num_groups: int, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(num_groups, num_channels, device=device, dtype=dtype)
    norm.weight.copy_(1 + 0.3 * torch.randn(num_channels))
    norm.bias.copy_(torch.randn(num_channels))
    x = (3 * torch.randn(2, num_channels, *grid) + 40).to(device, dtype).contiguous(memory_format=torch.channels_last)
    x[1] -= 35
    added = torch.randn(2, num_channels, device=device, dtype=dtype)
    index = torch.randperm(2 * grid[0] * grid[1])[:13].to(device)
    wide_norm = copy.deepcopy(norm).double()
    for column, activates, chosen in itertools.product((None, added), (False, True), (None, index)):
        found = group_norm_fused(x, norm, column, activates, chosen)
        wide_column = column if column is None else column.double()
        close(found, group_norm_reference(x.double(), wide_norm, wide_column, activates, chosen))
        assert chosen is not None or found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("num_channels", "grid"), [(32, (3, 5)), (96, (16, 8)), (320, (9, 7))])
def test_the_sum_of_two_pictures_and_a_bias(
    device: str, dtype: torch.dtype, num_channels: int, grid: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, num_channels, *grid, device=device, dtype=dtype)
    bias = torch.randn(num_channels, device=device, dtype=dtype)
    found = add_bias_fused(x, y.contiguous(memory_format=torch.channels_last), bias)
    close(found, add_bias_reference(*wide(x, y, bias)))
    assert found.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
@pytest.mark.gpu
def test_group_norm_of_a_large_picture() -> None:
    """A picture of an autoencoder's size, which is summed in more pieces."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(32, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 128, 1024, 768, device="cuda").add(3).bfloat16().contiguous(memory_format=torch.channels_last)
    truth = group_norm_reference(x.double(), copy.deepcopy(norm).double(), None, True, None)
    close(group_norm_fused(x, norm, None, True, None), truth)


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 72, 1280])
def test_layer_norm(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(width, device=device, dtype=dtype)
    norm.weight.copy_(1 + 0.3 * torch.randn(width))
    norm.bias.copy_(torch.randn(width))
    wide_norm = copy.deepcopy(norm).double()
    x, y = torch.randn(2, 11, width, device=device, dtype=dtype)
    close(layer_norm_fused(x, norm), layer_norm_reference(x.double(), wide_norm))
    total, normed = add_layer_norm_fused(x, y, norm)
    close(total, x.double() + y.double())
    close(normed, layer_norm_reference(total.double(), wide_norm))
    plain = nn.LayerNorm(width, elementwise_affine=False)
    close(layer_norm_fused(x, plain), layer_norm_reference(x.double(), plain))


@pytest.mark.parametrize("width", [16, 72, 2560])
def test_geglu(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(5, 2 * width, device=device, dtype=dtype)
    close(geglu_fused(x), geglu_reference(x.double()))


@pytest.mark.parametrize("width", [16, 72, 2560])
def test_silu_gate(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    gate, value = torch.randn(5, 2 * width, device=device, dtype=dtype).split(width, dim=1)  # columns of one product
    close(silu_gate_fused(gate, value), silu_gate_reference(*wide(gate, value)))


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("width", [16, 72, 640])
def test_filling_is_exact(device: str, dtype: torch.dtype, width: int, num_parts: int) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(num_parts, 30, width, device=device, dtype=dtype) for _ in range(3)]
    flowing = list(torch.randn(num_parts, 13, width, device=device, dtype=dtype))
    origin = torch.full((3, 30), -1, device=device)
    for branch, count in enumerate((5, 8)):
        origin[branch, torch.randperm(30)[:count].to(device)] = 5 * branch + torch.arange(count, device=device)
    found, expected, addressed = torch.zeros(3, num_parts, 3, 30, width, device=device, dtype=dtype)
    fill_rows_fused(sources, origin, flowing, found)
    fill_rows_reference(sources, origin, flowing, expected)
    assert torch.equal(found, expected)
    assert torch.equal(found[:, 2], sources[2])
    assert torch.equal(found[0, 1][origin[1] >= 0], flowing[0][origin[1][origin[1] >= 0]])
    table = torch.tensor([source.data_ptr() for source in sources], device=device)
    fill_rows_fused(Addresses(table), origin, flowing, addressed)
    assert torch.equal(addressed, expected)
    without: list[Tensor | None] = [*sources[:2], None]
    fill_rows_fused(without, origin, flowing, addressed)
    assert torch.equal(addressed[:, :2], expected[:, :2])
    columns = torch.cat([flowing[0], *flowing], dim=1).split(width, dim=1)[1:]  # of one product
    fill_rows_fused(sources, origin, columns, addressed)
    assert torch.equal(addressed, expected)


@pytest.mark.gpu
def test_the_switch_turns_kernels_off() -> None:
    x = torch.zeros(1, device="cuda")
    assert switch.runs_fused(x)
    with switch.kernels(enabled=False):
        assert not switch.runs_fused(x)
    assert switch.runs_fused(x)


def test_references_run_on_a_cpu() -> None:
    assert not switch.runs_fused(torch.zeros(1))
    keys = torch.zeros(2, 1, 1, 2)
    tokens = Projected(None, torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]]), nn.RMSNorm(2), nn.RMSNorm(2))
    with torch.no_grad():
        place(tokens, torch.tensor([[1j]]), None, Heads(None, keys))
    size = (12.5) ** 0.5
    torch.testing.assert_close(keys[:, 0, 0], torch.tensor([[-4 / size, 3 / size], [5.0, 6.0]]))

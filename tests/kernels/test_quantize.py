"""Rows and products of low precision: kernels against their references, and what is lost."""

import copy
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from instgenie.kernels import modulate, quantize, rms_modulate
from instgenie.kernels.fp8 import LARGEST
from instgenie.kernels.geglu import geglu, geglu_fused
from instgenie.kernels.gelu import beside_gelu, beside_gelu_fused, gelu
from instgenie.kernels.layer_norm import add_layer_norm, add_layer_norm_fused, layer_norm, layer_norm_fused
from instgenie.kernels.quantize import Fp8Rows, Rows, quantize_rows_fused, quantize_rows_reference, scaled_product
from instgenie.kernels.silu_gate import silu_gate_fused
from instgenie.kernels.swiglu import beside_swiglu, beside_swiglu_fused, swiglu


def values_of(rows: Rows) -> Tensor:
    assert isinstance(rows, Fp8Rows)
    assert rows.scale.shape == (len(rows.values), 1)
    assert rows.scale.is_contiguous()
    return rows.values.float() * rows.scale


def interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def within_a_sixteenth(found: Rows, truth: Tensor) -> None:
    """Within half a step of e4m3, and of the inputs' own rounding. The interpreter rounds some values that are close to
    a power of two to half of it."""
    steps = truth.abs() / 16 + truth.abs().amax(dim=1, keepdim=True) / LARGEST * 2**-9
    is_close = (values_of(found) - truth).abs() <= 1.2 * steps
    assert is_close.float().mean() > (0.9 if interprets() else 0.9999)
    assert isinstance(found, Fp8Rows)
    used = found.values.float().abs().amax(dim=1)
    assert ((used == LARGEST) | (truth.abs().amax(dim=1) == 0)).all()


@pytest.mark.parametrize("num_rows", [1, 5, 37])
@pytest.mark.parametrize("width", [16, 72, 3072, 15360])
def test_rows_are_quantised_as_by_the_reference(device: str, dtype: torch.dtype, width: int, num_rows: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(num_rows, width + 8) * torch.logspace(-3, 3, num_rows)[:, None]).to(device, dtype)[:, 8:]
    x[0] = 0
    found, expected = quantize_rows_fused(x), quantize_rows_reference(x)
    torch.testing.assert_close(found.scale, expected.scale)
    within_a_sixteenth(found, x.float())
    same = (found.values.view(torch.uint8) == expected.values.view(torch.uint8)).float().mean()
    assert same > (
        0.9 if interprets() else 0.99
    )  # a division that rounds otherwise may cross the middle between two values


@torch.no_grad()
@pytest.mark.parametrize("width", [16, 72, 1280])
def test_kernels_write_rows_as_products_read_them(device: str, dtype: torch.dtype, width: int) -> None:
    """Norms, modulation and activations: the same numbers as without fp8, within its rounding."""
    torch.manual_seed(0)
    random = partial(torch.randn, device=device, dtype=dtype)
    x, y = 3 * random(11, width) + 1, random(11, width)
    gate, shift, scale = random(2, 3 * width).split(width, dim=1)
    rows = torch.randint(2, (11,), device=device)
    norm = nn.LayerNorm(width, device=device, dtype=dtype)
    attended = [random(4, 48), random(7, 48)]
    columns = shift, scale, rows, 1e-6
    hidden, halves = random(11, width + 16)[:, 16:], random(11, 2 * width)
    within_a_sixteenth(
        modulate.norm_modulate_fused(x, *columns, fp8=True), whole(modulate.norm_modulate_fused(x, *columns))
    )
    total, normed = modulate.add_norm_modulate_fused(x, gate, y, *columns, fp8=True)
    plain, truth = modulate.add_norm_modulate_fused(x, gate, y, *columns)
    assert total.equal(plain)
    within_a_sixteenth(normed, whole(truth))
    by_factor = scale, rows, 1e-5
    within_a_sixteenth(
        rms_modulate.rms_modulate_fused(x, *by_factor, fp8=True), whole(rms_modulate.rms_modulate_fused(x, *by_factor))
    )
    total, normed = rms_modulate.add_rms_modulate_fused(x, gate, y, *by_factor, 1e-6, fp8=True)
    plain, truth = rms_modulate.add_rms_modulate_fused(x, gate, y, *by_factor, 1e-6)
    torch.testing.assert_close(total, plain)  # two kernels, whose sums may have two orders
    within_a_sixteenth(normed, whole(truth))
    within_a_sixteenth(layer_norm_fused(x, norm, fp8=True), whole(layer_norm_fused(x, norm)))
    total, normed = add_layer_norm_fused(x, y, norm, fp8=True)
    plain, truth = add_layer_norm_fused(x, y, norm)
    assert total.equal(plain)
    within_a_sixteenth(normed, whole(truth))
    within_a_sixteenth(geglu_fused(halves, fp8=True), whole(geglu_fused(halves)))
    within_a_sixteenth(silu_gate_fused(*halves.chunk(2, 1), fp8=True), whole(silu_gate_fused(*halves.chunk(2, 1))))
    for beside, inner in ((beside_gelu_fused, hidden), (beside_swiglu_fused, halves)):
        within_a_sixteenth(beside([x[:, :0]], inner, fp8=True), whole(beside([x[:, :0]], inner)))
        within_a_sixteenth(beside(attended, inner, fp8=True), whole(beside(attended, inner)))


def whole(rows: Rows) -> Tensor:
    assert isinstance(rows, Tensor)
    return rows.float()


@torch.no_grad()
def test_references_quantise_what_they_compute_without_fp8() -> None:
    """Where no kernel runs; the values are those of a quantisation after the fact."""
    torch.manual_seed(0)
    x, y, halves = torch.randn(7, 48), torch.randn(7, 48), torch.randn(7, 96)
    gate, shift, scale = torch.randn(1, 144).split(48, dim=1)
    norm = nn.LayerNorm(48)
    columns = shift, scale, None, 1e-6
    makes: list[Callable[[bool], Rows]] = [
        lambda fp8: modulate.norm_modulate(x, *columns, fp8),
        lambda fp8: modulate.add_norm_modulate(x, gate, y, *columns, fp8)[1],
        lambda fp8: layer_norm(x, norm, fp8),
        lambda fp8: add_layer_norm(x, y, norm, fp8)[1],
        lambda fp8: geglu(halves, fp8),
        lambda fp8: gelu(halves, fp8),
        lambda fp8: beside_gelu([x[:3], x[3:]], halves, fp8),
        lambda fp8: swiglu(halves, fp8),
        lambda fp8: beside_swiglu([x[:3], x[3:]], halves, fp8),
    ]
    for make in makes:
        found, plain = make(True), make(False)
        assert isinstance(plain, Tensor)
        assert values_of(found).equal(values_of(quantize_rows_reference(plain)))
        within_a_sixteenth(found, plain)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 482])
def test_a_product_of_low_precision_is_close_to_the_whole_one(num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_rows, 256), torch.randn(48, 256), torch.randn(48)
    kept = quantize_rows_reference(weight)
    found = scaled_product(quantize_rows_reference(x), kept.values, kept.scale[:, 0], bias, torch.float32)
    assert found.shape == (num_rows, 48)
    assert torch.allclose(found, x @ weight.t() + bias, atol=4.0)
    error = (found - (x @ weight.t() + bias)).norm() / max(float((x @ weight.t()).norm()), 1.0)
    assert error < 0.05


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_no_number_in_it_gives_none(bad: float) -> None:
    x, weight = torch.ones(3, 16), quantize_rows_reference(torch.ones(16, 16))
    x[1, 4] = bad
    found = scaled_product(quantize_rows_reference(x), weight.values, weight.scale[:, 0], None, torch.float32)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].allclose(torch.tensor(16.0))


# On a GPU


def needs_fp8() -> None:
    if not quantize.multiplies_fp8(torch.device("cuda")):
        pytest.skip("this GPU does not multiply in fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 32, 450, 482, 4608])
@pytest.mark.parametrize(("width", "num_outputs"), [(3072, 9216), (15360, 3072), (640, 1936), (16, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_on_a_gpu_equal_the_reference(num_rows: int, width: int, num_outputs: int, has_bias: bool) -> None:
    """Of any number of rows; of rows that begin anywhere; fast accumulation keeps about 14 bits."""
    needs_fp8()
    torch.manual_seed(0)
    x = torch.randn(num_rows + 3, width, device="cuda", dtype=torch.bfloat16)
    weight = quantize_rows_fused(torch.randn(num_outputs, width, device="cuda", dtype=torch.bfloat16))
    bias = torch.randn(num_outputs, device="cuda", dtype=torch.bfloat16) if has_bias else None
    rows = quantize_rows_fused(x)
    for one in (quantize_rows_fused(x[3:]), Fp8Rows(rows.values[3:], rows.scale[3:].clone())):
        found = quantize.scaled_product_fused(one, weight.values, weight.scale[:, 0], bias, torch.bfloat16)
        truth = quantize.scaled_product_reference(one, weight.values, weight.scale[:, 0], bias, torch.float32)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), truth, rtol=2**-7, atol=float(truth.abs().max()) * 2**-9)


@pytest.mark.gpu
@torch.no_grad()
def test_rows_and_products_are_captured_in_a_graph() -> None:
    """Norm, product, activation, product: replayed with other values, without a launch that a graph does not own."""
    needs_fp8()
    torch.manual_seed(0)
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, norm = random(77, 640), nn.LayerNorm(640, device="cuda", dtype=torch.bfloat16)
    first, second = (quantize_rows_fused(random(*shape)) for shape in ((2560, 640), (640, 2560)))

    def run() -> Tensor:
        inner = layer_norm_fused(x, norm, fp8=True)
        assert isinstance(inner, Fp8Rows)
        hidden = scaled_product(inner, first.values, first.scale[:, 0], None, torch.bfloat16)
        fed = beside_gelu_fused([x], hidden, fp8=True)
        assert isinstance(fed, Fp8Rows)
        fed = beside_gelu_fused([x[:, :0]], hidden, fp8=True)
        assert isinstance(fed, Fp8Rows)
        return scaled_product(fed, second.values, second.scale[:, 0], None, torch.bfloat16)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        x.copy_(random(77, 640))
        graph.replay()
        captured = copy.deepcopy(out)
        assert captured.equal(run())

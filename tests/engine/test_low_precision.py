"""Steps with products in fp8 on a GPU that has them: captured, from main memory, with kernels and without."""

from pathlib import Path

import pytest
import torch
from helpers.cuda import waiting_is_an_error
from helpers.edits import make_edit, prepare
from torch import Tensor

from instgenie.engine.graphs import Graphs
from instgenie.engine.register import register, reuse
from instgenie.jobs.job import Job
from instgenie.kernels.quantize import multiplies_fp8
from instgenie.kernels.switch import kernels
from instgenie.models.layers.fp8_linear import Fp8Linear
from instgenie.models.layers.linear import as_one
from instgenie.models.loading.load import load
from instgenie.models.model import Model

pytestmark = pytest.mark.gpu
FAMILIES = ["fill", "sdxl", "sd3", "klein", "qwen", "qwen_edit", "builtin"]


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest, folders: dict[str, Path]) -> str:
    if not multiplies_fp8(torch.device("cuda")):
        pytest.skip("this GPU does not multiply in fp8")
    return "builtin" if request.param == "builtin" else str(folders[request.param])


@pytest.fixture
def low(name: str) -> Model:
    return load(name, "cuda", quantization="fp8")


def make_jobs(model: Model) -> list[Job]:
    """A cached job and a dense one, with another mask."""
    edits = [make_edit(size=(64, 64), steps=3, share=share) for share in (0.3, 0.5)]
    kept = register(edits[0].picture, model, edits[0].size, 3, edits[0].guidance, cache_dtype="fp8")
    return [reuse(prepare(edits[0], model), kept), prepare(edits[1], model)]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_layers_are_exchanged_and_joined(low: Model) -> None:
    layers = [layer for layer in low.network.modules() if isinstance(layer, Fp8Linear)]
    assert layers
    assert all(layer.weight.is_cuda and layer.scale.is_cuda for layer in layers)
    if low.text_flows:
        attn = low.network.transformer_blocks[0].attn
        assert as_one([attn.to_q.weight, attn.to_k.weight, attn.to_v.weight]) is not None


@torch.inference_mode()
def test_steps_are_close_to_those_of_whole_products(low: Model, name: str) -> None:
    whole = load(name, "cuda")
    for found, expected in zip(low.predict(make_jobs(low)), whole.predict(make_jobs(whole)), strict=True):
        assert 0 < error(found[0], expected[0]) < 0.15


@torch.inference_mode()
def test_kernels_and_references_agree(low: Model, name: str) -> None:
    """They round at other places, which moves some values to a neighbour in fp8: by less than fp8 itself does."""
    jobs = make_jobs(low)
    found = low.predict(jobs)
    with kernels(enabled=False):
        expected = low.predict(jobs)
    whole = load(name, "cuda")
    for one, other, exact in zip(found, expected, whole.predict(make_jobs(whole)), strict=True):
        assert error(one[0], other[0]) < error(other[0], exact[0])


@torch.inference_mode()
def test_captured_steps_equal_those_that_are_not(low: Model) -> None:
    """Within rounding; again and again bit by bit, and without waiting for the device."""
    jobs = make_jobs(low)[:1]
    graphs = Graphs(low, max_readers=8)
    expected = [one.clone() for one in low.predict(jobs)[0]]
    graphs.predict(jobs)
    graphs.predict(jobs)
    assert graphs.captured, graphs.reasons
    with waiting_is_an_error():
        [found] = graphs.predict(jobs)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 0.02  # lists are padded, so products have other shapes
    [again] = graphs.predict(jobs)
    assert all(one.equal(other) for one, other in zip(found, again, strict=True))

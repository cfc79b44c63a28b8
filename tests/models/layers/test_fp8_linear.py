"""Layers of low precision in place of a network's own: which ones, how close they are, and what is refused."""

import copy
import re
from dataclasses import replace
from itertools import chain

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from helpers.edits import make_edit
from torch import nn

from instgenie.cli import EXIT_BAD_INPUT, main
from instgenie.cluster.config import process_config, resolve
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.errors import ConfigError, ModelError
from instgenie.kernels.quantize import Fp8Rows, quantize_rows
from instgenie.models.families import FAMILIES
from instgenie.models.joint.model import JointModel
from instgenie.models.layers.fp8_linear import Fp8Linear, quantizable, quantize_layers
from instgenie.models.layers.linear import as_one, join, linear, linears
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.models.unet.flow import projections
from instgenie.server.config import read_config

STAYS = re.compile(  # embedders, modulation, the final projection, keys of the prompt: few rows, or quality
    r"x_embedder|context_embedder|proj_out|proj_in|norm|time|embed|attn2\.to_[kv]|to_out|resnets|attentions\.\d+\.proj"
)


@pytest.fixture(scope="module")
def low(models: dict[str, Model]) -> Model:
    return load("builtin", "cpu", quantization="fp8", emulates=True)


def quantized(model: Model) -> Model:
    """The same model with layers of low precision."""
    network = copy.deepcopy(model.network)
    quantize_layers(network, FAMILIES[model.family].fp8_layers, model.device)
    return replace(model, **{model.network_name: network})


def test_products_over_tokens_are_of_low_precision_and_the_others_are_not(low: Model, models: dict[str, Model]) -> None:
    exchanged = {name for name, layer in low.network.named_modules() if isinstance(layer, Fp8Linear)}
    assert len(exchanged) == 2 * 12 + 7 * 5  # heads, outputs and feed-forward layers of double blocks; of single ones
    kept = {name for name, layer in low.network.named_modules() if type(layer) is nn.Linear}
    assert kept == {name for name in kept if STAYS.search(name)}
    whole = models["builtin"].network
    sizes = [sum(one.numel() * one.element_size() for one in network.parameters()) for network in (low.network, whole)]
    assert sizes[0] < 0.5 * sizes[1]  # float32 to one byte, but for modulation
    assert low.describe() == models["builtin"].describe()
    assert low.digest != models["builtin"].digest  # its activations are other numbers


def test_layers_of_a_unet_whose_input_a_kernel_writes_are_of_low_precision(models: dict[str, Model]) -> None:
    names = [name for name, _ in quantizable(models["sdxl"].network, FAMILIES["unet"].fp8_layers)]
    ends = {name.partition("transformer_blocks.")[2].partition(".")[2] for name in names}
    of_block = {"attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "ff.net.0.proj", "ff.net.2"}
    assert ends == of_block


@torch.inference_mode()
@pytest.mark.parametrize("family", ["fill", "sdxl", "builtin", "zimage"])
@pytest.mark.parametrize("kind", ["kv", "y"])
def test_a_step_is_close_to_that_of_whole_products(models: dict[str, Model], family: str, kind: str) -> None:
    """Dense and cached, with activations of its own: the error is that of eight bits, a few percent."""
    whole = models[family]
    steps = []
    for model in (whole, quantized(whole)):
        edit = make_edit(size=(64, 64), steps=2, share=0.3)
        kept = register(edit.picture, model, edit.size, 2, edit.guidance, kind)  # type: ignore[arg-type]
        dense = prepare(edit, model)
        cached = reuse(prepare(edit, model), kept)
        steps.append([model.predict([job])[0][0] for job in (dense, cached)])
    for exact, found in zip(*steps, strict=True):
        error = (found - exact).norm() / exact.norm()
        assert 0 < error < 0.12


@torch.inference_mode()
@pytest.mark.parametrize("family", ["fill", "sdxl", "zimage"])
def test_jobs_of_low_precision_do_not_depend_on_each_other(models: dict[str, Model], family: str) -> None:
    """Every row has a scale of its own, so a batch computes what its jobs compute alone."""
    model = quantized(models[family])
    edits = [
        make_edit(size=(32, 32), steps=2, share=share, seed=seed) for seed, share in enumerate((0.2, 0.6), start=2)
    ]
    alone = [model.predict([prepare(edit, model)])[0] for edit in edits]
    together = model.predict([prepare(edit, model) for edit in edits])
    for one, other in zip(alone, together, strict=True):
        for found, expected in zip(other, one, strict=True):
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)  # a value may round to its neighbour


@torch.inference_mode()
def test_an_edit_of_low_precision_runs_to_its_end(low: Model) -> None:
    engine = Engine(low)
    job = prepare(make_edit(size=(64, 64), steps=2), low)
    engine.join(job)
    while engine.jobs:
        engine.step()
    assert job.latents.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_joined_layers_are_one_product(is_low: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, num, bias=has_bias).requires_grad_(False) for num in (16, 48, 16)]
    layers = [Fp8Linear(layer) if is_low else layer for layer in layers]  # type: ignore[arg-type]
    x = torch.randn(5, 32)
    apart = [linear(layer, x, None) for layer in layers]
    assert all(one.is_contiguous() for one in linears(layers, x, None))
    before = {name: value.clone() for layer in layers for name, value in layer.named_parameters(str(id(layer)))}
    join(layers)
    after = {name: value for layer in layers for name, value in layer.named_parameters(str(id(layer)))}
    assert all(after[name].float().equal(value.float()) for name, value in before.items())
    weight = as_one([layer.weight for layer in layers])  # type: ignore[misc]
    assert weight is not None
    assert weight.shape == (80, 32)
    found = linears(layers, quantize_rows(x) if is_low else x, None)
    assert not any(one.is_contiguous() for one in found)  # columns of one product
    for one, expected in zip(found, apart, strict=True):
        torch.testing.assert_close(one, expected)
    assert len(linears(layers[1:], x, None)) == 2  # neighbours among them are one product, too
    assert as_one([layers[0].weight, layers[2].weight]) is None  # type: ignore[list-item]
    mixed = [layers[0], nn.Identity()]
    join(mixed)  # layers of two kinds stay as they are


def first_projections(model: Model) -> list[nn.Module]:
    """The layers of queries, keys and values of the first block."""
    if isinstance(model, JointModel):
        return list(model.joint_network.blocks[0].entries(is_text=False)[0].projections[:3])
    return projections(next(one for one in model.network.modules() if isinstance(one, BasicTransformerBlock)))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["blend_guided", "fill", "sd3", "klein", "qwen", "zimage", "sdxl"])
@pytest.mark.parametrize("is_low", [False, True])
def test_a_network_of_joined_layers_computes_the_same(models: dict[str, Model], family: str, is_low: bool) -> None:
    whole = quantized(models[family]) if is_low else models[family]
    joined = replace(whole, **{whole.network_name: copy.deepcopy(whole.network)})
    join_layers = FAMILIES[whole.family].join_layers
    assert join_layers is not None
    join_layers(joined.network)
    assert as_one([layer.weight for layer in first_projections(joined)]) is not None
    edits = [make_edit(size=(32, 32), steps=2, share=share, true_guidance=2.0) for share in (0.2, 0.5)]
    for kind in ("kv", "y"):
        found, expected = (
            model.predict(
                [reuse(prepare(e, model), register(e.picture, model, e.size, 2, e.guidance, kind)) for e in edits]
            )
            for model in (joined, whole)
        )
        for one, other in zip(chain(*found), chain(*expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0.05 if is_low else 1e-4, atol=0.02 if is_low else 1e-5)


def test_rows_that_no_kernel_has_quantised_are_quantised_by_the_layer() -> None:
    layer, x = Fp8Linear(nn.Linear(16, 32).requires_grad_(False)), torch.randn(3, 16)
    rows = quantize_rows(x)
    assert isinstance(rows, Fp8Rows)
    assert layer(x).equal(layer(rows))


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"quantization fp8 needs a GPU of compute capability 8\.9 or more: this is a CPU"
    ):
        load("builtin", "cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="quantization is 'fp8': it needs a GPU, and the device is cpu"):
        read_config({"quantization": "fp8", "device": "cpu"}, {})
    assert read_config({"device": "cpu"}, {}).cluster.quantization is None


def test_the_option_reaches_the_workers() -> None:
    config = read_config({"device": "cuda"}, {"INSTGENIE_QUANTIZATION": "fp8"}).cluster
    assert config.quantization == "fp8"
    assert process_config(resolve(config, 2**30), "a", "cuda", "").quantization == "fp8"
    with pytest.raises(ConfigError, match="quantization"):
        read_config({"quantization": "int8", "device": "cuda"}, {})


def test_the_command_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "edit", "--device", "cpu", "--quantization", "fp8"]) == EXIT_BAD_INPUT
    assert "needs a GPU of compute capability 8.9 or more" in capsys.readouterr().err

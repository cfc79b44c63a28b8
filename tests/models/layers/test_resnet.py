"""A residual block with biases fused into neighbouring launches, against diffusers' own."""

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from instgenie.models.layers import resnet as module
from instgenie.models.layers.resnet import convolve, is_plain

WIDTH = 24  # of the embedded time


def make_block(num_out: int, has_time: bool) -> ResnetBlock2D:
    torch.manual_seed(0)
    return ResnetBlock2D(in_channels=32, out_channels=num_out, temb_channels=WIDTH if has_time else None, groups=8)


def check(block: ResnetBlock2D, x: Tensor, time: Tensor | None) -> None:
    assert is_plain(block)
    expected = block(x, time)
    found = convolve(block, x, None if time is None else nn.functional.silu(time))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.is_contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_out", [32, 64])
@pytest.mark.parametrize("has_time", [False, True])
def test_as_diffusers_does(monkeypatch: pytest.MonkeyPatch, has_time: bool, num_out: int, is_fused: bool) -> None:
    """References run in place of kernels; the fused path adds biases elsewhere."""
    monkeypatch.setattr(module, "runs_fused", lambda _: is_fused)
    x = torch.randn(3, 32, 6, 5).contiguous(memory_format=torch.channels_last)
    check(make_block(num_out, has_time), x, torch.randn(3, WIDTH) if has_time else None)


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("num_pictures", [1, 3])
@pytest.mark.parametrize("num_out", [32, 64])
@pytest.mark.parametrize("has_time", [False, True])
def test_as_diffusers_does_with_kernels(has_time: bool, num_out: int, num_pictures: int) -> None:
    block = make_block(num_out, has_time).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(num_pictures, 32, 6, 5, device="cuda")
    for own in (x, x.contiguous(memory_format=torch.channels_last)):
        check(block, own, torch.randn(num_pictures, WIDTH, device="cuda") if has_time else None)


def test_an_adapted_convolution_is_called_as_it_is() -> None:
    block = make_block(32, has_time=False)
    block.conv2 = nn.Sequential(block.conv2, nn.Identity())
    assert not is_plain(block)


def test_a_convolution_that_goes_around_the_edge_is_called_as_it_is() -> None:
    block = make_block(32, has_time=False)
    block.conv1.padding_mode = "circular"
    assert not is_plain(block)

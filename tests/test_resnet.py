"""A residual block whose biases are added by its neighbours, against diffusers' own."""

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from instgenie.models import resnet as module
from instgenie.models.resnet import convolve, is_plain

WIDTH = 24  # of the embedded time


@torch.inference_mode()
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_out", [32, 64])
@pytest.mark.parametrize("has_time", [False, True])
def test_as_diffusers_does(monkeypatch: pytest.MonkeyPatch, has_time: bool, num_out: int, is_fused: bool) -> None:
    """References run in place of kernels; what is fused is where biases go."""
    monkeypatch.setattr(module, "runs_fused", lambda _: is_fused)
    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=32, out_channels=num_out, temb_channels=WIDTH if has_time else None, groups=8)
    assert is_plain(block)
    x = torch.randn(3, 32, 6, 5).contiguous(memory_format=torch.channels_last)
    time = torch.randn(3, WIDTH) if has_time else None
    expected = block(x, time)
    found = convolve(block, x, None if time is None else nn.functional.silu(time))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)

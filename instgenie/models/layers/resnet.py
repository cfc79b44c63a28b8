"""diffusers' convolutional residual block, with norms and biases fused into neighbouring launches."""

from collections.abc import Iterator

import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from instgenie.adapters.applied import BatchLoras
from instgenie.kernels.add import add_bias
from instgenie.kernels.group_norm import group_norm
from instgenie.kernels.switch import runs_fused
from instgenie.models.layers.linear import EACH_BRANCH, Owners, linear


def convolve(resnet: ResnetBlock2D, x: Tensor, active: Tensor | None = None, owners: Owners = EACH_BRANCH) -> Tensor:
    """Run a plain block. `active` [pictures, width] is the embedded time, where there is one, as linear layers read it.
    LoRAs may patch its projection of the time, but none of its convolutions.

    torch adds the bias of a convolution in a launch of its own that reads and writes the whole picture. Where kernels
    run, the norm adds the first convolution's bias together with the time, and the final sum adds the second's.
    """
    column = None
    if resnet.time_emb_proj is not None:
        assert active is not None
        column = linear(resnet.time_emb_proj, active, owners)
    first, second, shortcut = resnet.conv1, resnet.conv2, resnet.conv_shortcut
    if not runs_fused(x):
        inner = first(group_norm(x, resnet.norm1, activates=True))
        inner = second(group_norm(inner, resnet.norm2, column, activates=True))
        out: Tensor = inner + (x if shortcut is None else shortcut(x))
        return out
    column = first.bias.expand(len(x), -1) if column is None else column + first.bias
    inner = without_bias(first, group_norm(x, resnet.norm1, activates=True))
    inner = without_bias(second, group_norm(inner, resnet.norm2, column, activates=True))
    return add_bias(x if shortcut is None else go_around(shortcut, x), inner, second.bias)


def go_around(shortcut: nn.Conv2d, x: Tensor, loras: BatchLoras | None = None) -> Tensor:
    pixels = x.permute(0, 2, 3, 1)
    owners = Owners(per_branch=x.shape[2] * x.shape[3], loras=loras)
    out: Tensor = linear(shortcut, pixels.flatten(0, 2), owners).unflatten(0, pixels.shape[:3])
    return out.permute(0, 3, 1, 2)


def without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def convolutions(resnet: ResnetBlock2D) -> Iterator[nn.Module]:
    return (conv for conv in (resnet.conv1, resnet.conv2, resnet.conv_shortcut) if conv is not None)


def is_plain(resnet: nn.Module) -> bool:
    """True for blocks as in every Stable Diffusion and its autoencoders. Others of diffusers' blocks, convolutions that
    an adapter wraps and convolutions that wrap around the picture's edge are not plain."""
    return (
        isinstance(resnet, ResnetBlock2D)
        and type(resnet.conv1) is type(resnet.conv2) is nn.Conv2d
        and type(resnet.conv_shortcut) in (nn.Conv2d, type(None))
        and resnet.conv1.padding_mode == resnet.conv2.padding_mode == "zeros"
        and (resnet.time_emb_proj is None or resnet.time_embedding_norm == "default")
        and isinstance(resnet.nonlinearity, nn.SiLU)
        and resnet.upsample is resnet.downsample is None
        and resnet.output_scale_factor == 1
        and not resnet.skip_time_act
    )

"""diffusers' convolutional residual block, its norms and biases fused with what stands around them."""

import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from instgenie.kernels.add import add_bias
from instgenie.kernels.group_norm import group_norm
from instgenie.kernels.switch import runs_fused


def convolve(resnet: ResnetBlock2D, x: Tensor, active: Tensor | None = None) -> Tensor:
    """A plain block. Active [pictures, width] is the embedded time, where there is one, as linear layers read it.

    torch adds the bias of a convolution behind it, in a launch that reads and writes the whole picture. Where kernels
    run, the norm adds that of the first one with the time, and the sum at the end that of the second.
    """
    column = None if resnet.time_emb_proj is None else resnet.time_emb_proj(active)
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


def go_around(shortcut: nn.Conv2d, x: Tensor) -> Tensor:
    tokens = x.permute(0, 2, 3, 1)
    out: Tensor = as_product(shortcut, tokens.flatten(0, 2)).unflatten(0, tokens.shape[:3])
    return out.permute(0, 3, 1, 2)


def as_product(conv: nn.Conv2d, tokens: Tensor) -> Tensor:  # [tokens, channels]
    """A convolution of one by one, with its bias in the same launch."""
    return F.linear(tokens, conv.weight.flatten(1), conv.bias)


def without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def is_plain(resnet: nn.Module) -> bool:
    """As in every Stable Diffusion and in its autoencoders; diffusers knows others, adapters wrap convolutions, and
    some make them go around the picture's edge."""
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

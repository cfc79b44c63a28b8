"""diffusers' convolutional residual block, its norms fused with what stands around them."""

from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from instgenie.kernels.group_norm import group_norm


def convolve(resnet: ResnetBlock2D, x: Tensor, active: Tensor | None = None) -> Tensor:
    """A plain block. Active [pictures, width] is the embedded time, where there is one, as linear layers read it."""
    column = None if resnet.time_emb_proj is None else resnet.time_emb_proj(active)
    inner = resnet.conv1(group_norm(x, resnet.norm1, activates=True))
    inner = resnet.conv2(group_norm(inner, resnet.norm2, column, activates=True))
    out: Tensor = (x if resnet.conv_shortcut is None else resnet.conv_shortcut(x)) + inner
    return out


def is_plain(resnet: nn.Module) -> bool:
    """As in every Stable Diffusion and in its autoencoders; diffusers knows others."""
    return (
        isinstance(resnet, ResnetBlock2D)
        and (resnet.time_emb_proj is None or resnet.time_embedding_norm == "default")
        and isinstance(resnet.nonlinearity, nn.SiLU)
        and resnet.upsample is resnet.downsample is None
        and resnet.output_scale_factor == 1
        and not resnet.skip_time_act
    )

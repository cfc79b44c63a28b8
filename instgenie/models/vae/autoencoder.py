"""Pictures to latents and back, through diffusers' autoencoders. The sub-modules of an AutoencoderKL, and of that of
FLUX.2, are called one by one, so that its norms are fused with the layers around them. Tiny autoencoders, that of
Qwen-Image, and those with other blocks, run as they are.
"""

from collections.abc import Iterable

from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderTiny
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UNetMidBlock2D, UpDecoderBlock2D
from torch import Tensor, nn

from instgenie.kernels.group_norm import group_norm
from instgenie.models.layers.resnet import convolve, is_plain
from instgenie.models.parts import Autoencoder


def decode_latents(vae: Autoencoder, latents: Tensor) -> Tensor:
    """[pictures, channels, rows, columns] -> [pictures, 3, height, width] in [-1, 1]"""
    if isinstance(vae, AutoencoderKLQwenImage):  # a picture is a film of one frame
        frame: Tensor = vae.decode(latents[:, :, None]).sample[:, :, 0]
        return frame
    if not is_known(vae):
        decoded: Tensor = vae.decode(latents).sample
        return decoded
    x = latents if vae.post_quant_conv is None else vae.post_quant_conv(latents)
    return run(vae.decoder, [vae.decoder.mid_block, *vae.decoder.up_blocks], x)


def encode_pictures(vae: Autoencoder, pictures: Tensor) -> Tensor:
    """[pictures, 3, height, width] in [-1, 1] -> [pictures, channels, rows, columns], the modes of the latents"""
    if isinstance(vae, AutoencoderTiny):
        latents: Tensor = vae.encode(pictures).latents
    elif isinstance(vae, AutoencoderKLQwenImage):
        latents = vae.encode(pictures[:, :, None]).latent_dist.mode()[:, :, 0]
    elif not is_known(vae):
        latents = vae.encode(pictures).latent_dist.mode()
    else:
        encoded = run(vae.encoder, [*vae.encoder.down_blocks, vae.encoder.mid_block], pictures)
        latents, _ = (encoded if vae.quant_conv is None else vae.quant_conv(encoded)).chunk(2, dim=1)
    return latents


def is_known(vae: nn.Module) -> bool:
    """True if it consists of the blocks that Stable Diffusion and Flux use, and neither tiles nor slices."""
    if not isinstance(vae, AutoencoderKL | AutoencoderKLFlux2) or vae.use_tiling or vae.use_slicing:
        return False
    plain = (DownEncoderBlock2D, UpDecoderBlock2D, UNetMidBlock2D)
    blocks = [*vae.encoder.down_blocks, vae.encoder.mid_block, vae.decoder.mid_block, *vae.decoder.up_blocks]
    return all(isinstance(block, plain) and all(map(is_plain, block.resnets)) for block in blocks)


def run(coder: Encoder | Decoder, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    x = coder.conv_in(x)
    for block in blocks:
        x = middle(block, x) if isinstance(block, UNetMidBlock2D) else resample(block, x)
    out: Tensor = coder.conv_out(group_norm(x, coder.conv_norm_out, activates=True))
    return out


def middle(block: UNetMidBlock2D, x: Tensor) -> Tensor:
    first, *others = block.resnets
    x = convolve(first, x)
    for attention, resnet in zip(block.attentions, others, strict=True):
        x = convolve(resnet, x if attention is None else attention(x))
    return x


def resample(block: DownEncoderBlock2D | UpDecoderBlock2D, x: Tensor) -> Tensor:
    for resnet in block.resnets:
        x = convolve(resnet, x)
    samplers = block.downsamplers if isinstance(block, DownEncoderBlock2D) else block.upsamplers
    for sampler in samplers or ():
        x = sampler(x)
    return x

"""Latents as the transformer sees them: packed 2x2, with the fill conditioning beside them."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from torch import Tensor

PATCH = 16  # a token covers 16 x 16 pixels
VAE_BATCH = 1024


def encode(vae: AutoencoderTiny, pictures: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] -> packed latents [B, N, 4C] in float32."""
    latents = torch.cat([vae.encode(part).latents for part in pictures.split(VAE_BATCH)]).float()
    return pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)


def decode(vae: AutoencoderTiny, packed: Tensor, height: int, width: int) -> Tensor:
    """Packed latents [B, N, 4C] -> pictures [B, 3, H, W] in [0, 1]."""
    latents = unpack(packed, height // 8, width // 8) / vae.config.scaling_factor + vae.config.shift_factor
    pictures = torch.cat([vae.decode(part).sample for part in latents.split(VAE_BATCH)])
    return (pictures / 2 + 0.5).clamp(0, 1)


def pack(latents: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h/2 * w/2, 4C], the order of the Flux pipelines."""
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return latents.reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack(packed: Tensor, height: int, width: int) -> Tensor:
    """[B, h/2 * w/2, 4C] -> [B, C, h, w]."""
    batch, _, channels = packed.shape
    latents = packed.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return latents.reshape(batch, channels // 4, height, width)


def token_masks(masks: Tensor) -> Tensor:
    """[B, H, W] bool -> [B, N] bool: a token is masked if any of its pixels is."""
    return F.max_pool2d(masks[:, None].float(), PATCH).flatten(1) > 0


def pack_masks(masks: Tensor) -> Tensor:
    """[B, H, W] bool -> [B, N, 256]: the 16x16 pixels of each token, the order of FluxFillPipeline."""
    batch, height, width = masks.shape
    pixels = masks.float().view(batch, height // 8, 8, width // 8, 8).permute(0, 2, 4, 1, 3)
    return pack(pixels.reshape(batch, 64, height // 8, width // 8))


def condition(clean: Tensor, greyed: Tensor, masks: Tensor, masked: Tensor) -> Tensor:
    """The fill conditioning of each token: [B, N, 4C + 256].

    A masked token carries the latents of the picture with its hole greyed out and the mask's pixels, as in
    FluxFillPipeline; an unmasked one carries the picture's own clean latents and mask 0.
    """
    return torch.cat([torch.where(masked[..., None], greyed, clean), pack_masks(masks).to(clean.dtype)], -1)


def image_ids(height: int, width: int, device: torch.device) -> Tensor:
    """[N, 3]: 0, row, column of each token."""
    rows, columns = torch.meshgrid(
        torch.arange(height // PATCH, device=device), torch.arange(width // PATCH, device=device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).float()

"""Tiny pipelines of the built-in model's kind, as folders."""

from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel

from helpers.families import make_flux


def save_pipeline(folder: Path, latent_channels: int, num_text: int) -> Path:
    """A tiny pipeline with latents of 8 x 8 pixels, as those of the built-in model."""
    torch.manual_seed(latent_channels)
    packed = 4 * latent_channels
    transformer = FluxTransformer2DModel(
        in_channels=2 * packed + 256, out_channels=packed, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )  # fmt: skip
    vae = AutoencoderTiny(
        latent_channels=latent_channels, encoder_block_out_channels=(4, 4, 4, 4), num_encoder_blocks=(1, 1, 1, 1),
        decoder_block_out_channels=(4, 4, 4, 4), num_decoder_blocks=(1, 1, 1, 1),
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    make_flux(FluxFillPipeline, transformer, vae, scheduler, num_text).save_pretrained(folder)
    return folder

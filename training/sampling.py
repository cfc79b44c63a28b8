"""A plain batched sampler over diffusers' own modules of a FluxFillPipeline, with the unmasked tokens pinned.

The slow truth beside the engine: every token is computed at every step. A token is masked when any of its pixels is.
Masked tokens see the picture with the hole greyed and the mask; unmasked tokens carry the picture's own clean latents
and mask 0, and their noisy latents are a fact of the picture and its noise, never of the prompt.
"""

from itertools import pairwise

import numpy as np
import torch
from diffusers import FluxFillPipeline
from diffusers.pipelines.flux.pipeline_flux_fill import calculate_shift
from torch import Generator, Tensor

VAE_BATCH = 64


def load_pipeline(folder: str, device: str | torch.device) -> FluxFillPipeline:
    """bf16 on a GPU with the autoencoder in float32, float32 everywhere on a CPU."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    pipe = FluxFillPipeline.from_pretrained(folder).to(device)
    for part in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        part.to(dtype)
    return pipe


def pack(x: Tensor) -> Tensor:
    """[B, C, h, w] -> tokens [B, h/2 * w/2, 4C]."""
    batch, channels, height, width = x.shape
    return FluxFillPipeline._pack_latents(x, batch, channels, height, width)


def pack_masks(masks: Tensor, scale: int) -> Tensor:
    """Pixel masks [B, H, W] -> [B, tokens, 4 * scale²], the layout of FluxFillPipeline.prepare_mask_latents."""
    batch, height, width = masks.shape
    blocks = masks.float().view(batch, height // scale, scale, width // scale, scale).permute(0, 2, 4, 1, 3)
    return pack(blocks.reshape(batch, scale * scale, height // scale, width // scale))


def encode(pipe: FluxFillPipeline, pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] -> packed latents [B, tokens, 4C] in float32."""
    vae = pipe.vae
    latents = torch.cat([vae.encode(part.to(vae.dtype)).latents for part in pictures.split(VAE_BATCH)])
    return pack((latents.float() - vae.config.shift_factor) * vae.config.scaling_factor)


def decode(pipe: FluxFillPipeline, tokens: Tensor, height: int, width: int) -> Tensor:
    """Packed latents -> pictures in [0, 1]."""
    vae = pipe.vae
    latents = pipe._unpack_latents(tokens, height, width, pipe.vae_scale_factor)
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    pictures = torch.cat([vae.decode(part.to(vae.dtype)).sample for part in latents.split(VAE_BATCH)])
    return (pictures.float() / 2 + 0.5).clamp(0, 1)


@torch.inference_mode()
def reconstruct(pipe: FluxFillPipeline, pictures: Tensor) -> Tensor:
    return decode(pipe, encode(pipe, pictures * 2 - 1), *pictures.shape[-2:])


def schedule(pipe: FluxFillPipeline, steps: int, num_tokens: int) -> list[float]:
    """Sigmas from 1 to 0 through the scheduler's own shift."""
    config = pipe.scheduler.config
    mu = calculate_shift(
        num_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), device="cpu", mu=mu)
    return pipe.scheduler.sigmas.tolist()


def draw_noise(like: Tensor, seed: int, generator: Generator | None) -> Tensor:
    """One seed per picture, so that a picture's noise does not depend on its batch."""
    if generator is not None:
        return torch.randn(like.shape, generator=generator, device=generator.device).to(like.device)
    rows = [torch.randn(like.shape[1:], generator=Generator().manual_seed(seed + i)) for i in range(len(like))]
    return torch.stack(rows).to(like.device)


@torch.inference_mode()
def fill(
    pipe: FluxFillPipeline,
    pictures: Tensor,  # [B, 3, H, W] in [0, 1]
    masks: Tensor,  # [B, H, W] bool, True = edit
    prompts: list[str],
    guidance: float | Tensor = 3.5,
    steps: int = 28,
    seed: int = 0,
    generator: Generator | None = None,
) -> Tensor:
    """Edited pictures [B, 3, H, W]; outside the mask they are the given ones. A full mask is text-to-image."""
    height, width = pictures.shape[-2:]
    hole = masks[:, None].float()
    clean = encode(pipe, pictures * 2 - 1)  # [B, T, 4C]
    greyed = encode(pipe, (pictures * 2 - 1) * (1 - hole))
    mask_tokens = pack_masks(masks, pipe.vae_scale_factor)
    masked = mask_tokens.any(2, keepdim=True)  # [B, T, 1]
    condition = torch.cat([torch.where(masked, greyed, clean), mask_tokens], 2)
    noise = draw_noise(clean, seed, generator)
    velocity = velocity_of(pipe, condition, prompts, guidance, height, width)

    sigmas = schedule(pipe, steps, clean.shape[1])
    x = noise
    for sigma, sigma_next in pairwise(sigmas):
        x = x + (sigma_next - sigma) * velocity(x, sigma)
        x = torch.where(masked, x, (1 - sigma_next) * clean + sigma_next * noise)
    return torch.where(masks[:, None], decode(pipe, x, height, width), pictures)


def velocity_of(pipe, condition: Tensor, prompts: list[str], guidance: float | Tensor, height: int, width: int):
    """The transformer as a function of (x, sigma) alone."""
    transformer, device = pipe.transformer, condition.device
    dtype, batch = transformer.dtype, len(condition)
    text, pooled, text_ids = pipe.encode_prompt(
        prompts, device=device, max_sequence_length=pipe.tokenizer_2.model_max_length
    )
    cell = pipe.vae_scale_factor * 2
    image_ids = pipe._prepare_latent_image_ids(batch, height // cell, width // cell, device, dtype)
    scale = torch.as_tensor(guidance, dtype=torch.float32, device=device).expand(batch)
    fixed = {
        "guidance": scale if transformer.config.guidance_embeds else None,
        "pooled_projections": pooled.to(dtype),
        "encoder_hidden_states": text.to(dtype),
        "txt_ids": text_ids,
        "img_ids": image_ids,
        "return_dict": False,
    }

    def velocity(x: Tensor, sigma: float) -> Tensor:
        tokens = torch.cat([x, condition], 2).to(dtype)
        timestep = torch.full((batch,), sigma, device=device, dtype=dtype)
        return transformer(hidden_states=tokens, timestep=timestep, **fixed)[0].float()

    return velocity

"""A plain batched sampler over diffusers' own modules of a FluxFillPipeline, with the unmasked tokens pinned.

The slow truth beside the engine: every token is computed at every step. A token is masked when any of its pixels is.
Masked tokens see the picture with the hole greyed and the mask; unmasked tokens carry the picture's own clean latents
and mask 0, and their noisy latents are a fact of the picture and its noise, never of the prompt.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from diffusers import FluxFillPipeline
from torch import Generator, Tensor

from instgenie.jobs.sampler import flow_schedule, flow_strength
from instgenie.jobs.strength import FROM_SURROUNDINGS, open_strength
from instgenie.models.joint.model import WHOLE_SIGMA
from instgenie.models.loading.load import quiet
from training.guidance import Guidance
from training.latents import condition, decode, encode, image_ids, token_masks

Velocity = Callable[[Tensor, float], Tensor]  # of noisy latents [B, N, 4C] at a time


def load_pipeline(folder: str, device: str | torch.device, dtype: torch.dtype) -> FluxFillPipeline:
    """The transformer and the text encoders in the given type, the autoencoder in float32."""
    with quiet():
        pipe = FluxFillPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
        for part in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
            part.to(dtype)
    return pipe


@torch.inference_mode()
def reconstruct(pipe: FluxFillPipeline, pictures: Tensor) -> Tensor:
    return decode(pipe.vae, encode(pipe.vae, pictures * 2 - 1), *pictures.shape[-2:])


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
    rule: Guidance | None = None,
    content: Tensor | None = None,  # like pictures
) -> Tensor:
    """Edited pictures [B, 3, H, W] as they are decoded, unmasked pixels too. A full mask is text-to-image.

    A model into which no guidance is distilled is guided by a rule, in two branches. Edits start from noise, or from
    content under as much noise as suits a removal.
    """
    height, width = pictures.shape[-2:]
    clean = encode(pipe.vae, pictures * 2 - 1)  # [B, N, 4C]
    greyed = encode(pipe.vae, (pictures * 2 - 1) * ~masks[:, None])
    masked = token_masks(masks)
    known = condition(clean, greyed, masks, masked)
    noise = draw_noise(clean, seed, generator)
    velocity = velocity_of(pipe, known, prompts, 1.0 if rule else guidance, height, width)
    if rule:
        velocity = guided(
            velocity, velocity_of(pipe, known, [""] * len(prompts), 1.0, height, width), masked, guidance, rule
        )

    first, strength = clean, 1.0
    if content is not None:
        first = encode(pipe.vae, content * 2 - 1)
        own = flow_strength(pipe.scheduler, clean.shape[1], WHOLE_SIGMA)
        strength, steps = open_strength(FROM_SURROUNDINGS * own, steps)
    sigmas = flow_schedule(pipe.scheduler, steps, clean.shape[1], strength).sigmas
    x = torch.lerp(torch.where(masked[..., None], first, clean), noise, sigmas[0])
    for sigma, sigma_next in pairwise(sigmas):
        x = x + (sigma_next - sigma) * velocity(x, sigma)
        x = torch.where(masked[..., None], x, (1 - sigma_next) * clean + sigma_next * noise)
    return decode(pipe.vae, x, height, width)


def guided(said: Velocity, unsaid: Velocity, masked: Tensor, scale: float | Tensor, rule: Guidance) -> Velocity:
    """The velocity that a rule makes of two branches."""

    def velocity(x: Tensor, sigma: float) -> Tensor:
        times = x.new_full((len(x),), sigma)
        with_caption = said(x, sigma)
        if not rule.share(times).any():
            return with_caption
        change = rule.change(with_caption, unsaid(x, sigma), x, times, masked)
        return with_caption + (torch.as_tensor(scale, device=x.device) - 1).view(-1, 1, 1) * change

    return velocity


def velocity_of(pipe, known: Tensor, prompts: list[str], guidance: float | Tensor, height: int, width: int) -> Velocity:
    """The transformer as a function of (x, sigma) alone."""
    transformer, device = pipe.transformer, known.device
    dtype, batch = transformer.dtype, len(known)
    text, pooled, text_ids = pipe.encode_prompt(
        prompts, device=device, max_sequence_length=pipe.tokenizer_2.model_max_length
    )
    scale = torch.as_tensor(guidance, dtype=torch.float32, device=device).expand(batch)
    fixed = {
        "guidance": scale if transformer.config.guidance_embeds else None,
        "pooled_projections": pooled.to(dtype),
        "encoder_hidden_states": text.to(dtype),
        "txt_ids": text_ids,
        "img_ids": image_ids(height, width, device),
        "return_dict": False,
    }

    def velocity(x: Tensor, sigma: float) -> Tensor:
        tokens = torch.cat([x, known], 2).to(dtype)
        timestep = torch.full((batch,), sigma, device=device, dtype=dtype)
        return transformer(hidden_states=tokens, timestep=timestep, **fixed)[0].float()

    return velocity

"""An edit becomes a job: pictures to latents, prompts to embeddings, seeds to noise. Takes no step.

Noise is drawn on the CPU, so that a result depends neither on the device nor on the other jobs.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from instgenie.batch import Branch, Job, Template
from instgenie.errors import EditError
from instgenie.mask import token_mask
from instgenie.models.flux import embed_positions, embed_prompt
from instgenie.models.load import Model
from instgenie.picture import check_edit, resize_mask, resize_picture, working_size
from instgenie.sampler import flow_noise, flow_sigmas
from instgenie.types import Edit, PixelMask, Pixels


@torch.inference_mode()
def prepare(edit: Edit, model: Model) -> Job:
    check_edit(edit)
    size = choose_size(edit, model)
    return make_job(edit, resize_mask(edit.mask, size), size, model)


def make_job(edit: Edit, mask: PixelMask, size: tuple[int, int], model: Model) -> Job:
    """The mask is of the size the model works at."""
    grid = size[0] // model.patch, size[1] // model.patch
    picture = picture_tensor(resize_picture(edit.picture, size)).to(model.device)
    template = Template(encode(picture, model), draw_noise(template_seed(edit.picture, size), grid, model))
    masked = torch.tensor(token_mask(mask, model.patch), device=model.device).reshape(-1, 1)
    sigmas = flow_sigmas(model.scheduler, edit.steps, len(masked), edit.strength).tolist()
    start = flow_noise(template.clean, draw_noise(edit.seed, grid, model), sigmas[0])
    return Job(
        edit=edit,
        grid=grid,
        template=template,
        masked=masked,
        conditioning=condition(picture, mask, masked, template, model),
        branches=tuple(make_branch(prompt, grid, model) for prompt in prompts(edit)),
        sigmas=sigmas,
        latents=torch.where(masked, start, template.at(sigmas[0])),
    )


def choose_size(edit: Edit, model: Model) -> tuple[int, int]:
    if edit.size is None:
        height, width = edit.picture.shape[:2]
        return working_size(height, width, model.patch, model.own_size)
    height, width = edit.size
    if height % model.patch or width % model.patch:
        raise EditError(f"the working size is {edit.size}: multiples of {model.patch}, for this model, are expected")
    return height, width


def prompts(edit: Edit) -> tuple[str, ...]:
    return (edit.prompt, edit.negative_prompt) if edit.true_guidance > 1 else (edit.prompt,)


def template_seed(picture: Pixels, size: tuple[int, int]) -> int:
    """A fact about the picture and the size it is worked at, whoever edits it."""
    digest = hashlib.sha256(f"{picture.shape} {size}".encode())
    digest.update(picture.tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def draw_noise(seed: int, grid: tuple[int, int], model: Model) -> Tensor:  # [tokens, channels]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, model.latent_channels, 2 * grid[0], 2 * grid[1], generator=generator)
    return pack_latents(noise).to(model.device)


def condition(picture: Tensor, mask: PixelMask, masked: Tensor, template: Template, model: Model) -> Tensor:
    """What fill models see beside the latents: masked tokens the picture with the hole greyed out and the mask's
    pixels, the others the template as it is and an empty mask."""
    if not model.is_fill:
        return template.clean[:, :0]
    pixels = torch.tensor(mask).to(picture)[None, None]  # [1, 1, height, width]
    hole = torch.cat([encode(picture * (1 - pixels), model), pack_mask(pixels, model.pixels_per_latent)], dim=1)
    whole = torch.nn.functional.pad(template.clean, (0, hole.shape[1] - template.clean.shape[1]))
    return torch.where(masked, hole, whole)


def picture_tensor(picture: Pixels) -> Tensor:  # [1, 3, height, width] in [-1, 1]
    return 2 * (torch.tensor(np.ascontiguousarray(picture)).permute(2, 0, 1)[None] / 255) - 1


def encode(picture: Tensor, model: Model) -> Tensor:  # [tokens, channels]
    vae = model.vae
    encoded = vae.encode(picture.to(model.dtype))
    latents = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.mode()
    return pack_latents((latents.float() - vae.config.shift_factor) * vae.config.scaling_factor)


def pack_latents(latents: Tensor) -> Tensor:
    """[1, channels, 2 rows, 2 columns] -> [rows * columns, channels * 4]: a token is a patch of two by two."""
    _, channels, height, width = latents.shape
    patches = latents.view(channels, height // 2, 2, width // 2, 2).permute(1, 3, 0, 2, 4)
    return patches.reshape(-1, channels * 4)


def pack_mask(pixels: Tensor, pixels_per_latent: int) -> Tensor:  # [tokens, pixels of a token]
    """A latent's channels are the mask's pixels under it; then packed as latents are."""
    return pack_latents(torch.nn.functional.pixel_unshuffle(pixels, pixels_per_latent))


def make_branch(prompt: str, grid: tuple[int, int], model: Model) -> Branch:
    sequence = embed_prompt(model.transformer, encode_sequence(prompt, model))
    return Branch(
        text=sequence,
        pooled=encode_pooled(prompt, model),
        rotary=embed_positions(model.transformer, len(sequence), grid),
    )


def encode_sequence(prompt: str, model: Model) -> Tensor:  # [text tokens, text channels]
    ids = tokenize(model.tokenizer_2, prompt, model.max_text_tokens).to(model.device)
    sequence: Tensor = model.text_encoder_2(ids)[0][0]
    return sequence.to(model.dtype)


def encode_pooled(prompt: str, model: Model) -> Tensor:  # [pooled channels]
    ids = tokenize(model.tokenizer, prompt, model.tokenizer.model_max_length).to(model.device)
    pooled: Tensor = model.text_encoder(ids).pooler_output[0]
    return pooled.to(model.dtype)


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, length: int) -> Tensor:
    ids: Tensor = tokenizer(
        prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids

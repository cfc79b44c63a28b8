"""A done job becomes a picture: decode at the model's size, composite at the picture's own. Takes no step."""

import torch
from torch import Tensor

from instgenie.batch import Job
from instgenie.models.model import Model, unpack_latents
from instgenie.picture import composite
from instgenie.types import Pixels


@torch.inference_mode()
def finish(job: Job, model: Model) -> Pixels:
    edit = job.edit
    return composite(edit.picture, decode(job.latents, job.grid, model), edit.mask, edit.feather)


def decode(latents: Tensor, grid: tuple[int, int], model: Model) -> Pixels:
    config = model.vae.config
    unscaled = unpack_latents(latents, grid, model.latents_per_token) / config.scaling_factor
    shifted = unscaled + (config.shift_factor or 0)
    decoded = model.vae.decode(shifted.to(model.dtype)).sample[0].float()  # [3, height, width] in [-1, 1]
    pixels: Pixels = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return pixels

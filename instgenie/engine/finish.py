"""A done job becomes a picture: decode at the model's size, composite at the picture's own. Takes no step."""

import torch
from torch import Tensor

from instgenie.batch import Job
from instgenie.models.load import Model
from instgenie.picture import composite
from instgenie.types import Pixels


@torch.inference_mode()
def finish(job: Job, model: Model) -> Pixels:
    edit = job.edit
    return composite(edit.picture, decode(job.latents, job.grid, model), edit.mask, edit.feather)


def decode(latents: Tensor, grid: tuple[int, int], model: Model) -> Pixels:
    config = model.vae.config
    unscaled = unpack_latents(latents, grid) / config.scaling_factor + config.shift_factor
    decoded = model.vae.decode(unscaled.to(model.dtype)).sample[0].float()  # [3, height, width] in [-1, 1]
    pixels: Pixels = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return pixels


def unpack_latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """[rows * columns, channels * 4] -> [1, channels, 2 rows, 2 columns]"""
    num_rows, num_columns = grid
    patches = tokens.view(num_rows, num_columns, -1, 2, 2).permute(2, 0, 3, 1, 4)
    return patches.reshape(1, -1, 2 * num_rows, 2 * num_columns)

"""A done job becomes a picture: decode at the model's size, composite at the picture's own. Takes no step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from instgenie.batch import Job, concat
from instgenie.models.model import Model, unpack_latents
from instgenie.picture import composite
from instgenie.types import Pixels


@torch.inference_mode()
def finish(job: Job, model: Model) -> Pixels:
    [picture] = finish_many([job], model)
    return picture


@torch.inference_mode()
def finish_many(jobs: Sequence[Job], model: Model) -> list[Pixels]:
    """Jobs of one grid, decoded in one pass."""
    decoded = decode([job.latents for job in jobs], jobs[0].grid, model)
    edits = [job.edit for job in jobs]
    return [composite(e.picture, pixels, e.mask, e.feather) for e, pixels in zip(edits, decoded, strict=True)]


def decode(latents: Sequence[Tensor], grid: tuple[int, int], model: Model) -> Sequence[Pixels]:
    config = model.vae.config
    unscaled = concat([unpack_latents(one, grid, model.latents_per_token) for one in latents]) / config.scaling_factor
    shifted = unscaled + (config.shift_factor or 0)
    decoded = model.vae.decode(shifted.to(model.dtype)).sample.float()  # [pictures, 3, height, width] in [-1, 1]
    pixels: Sequence[Pixels] = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return pixels

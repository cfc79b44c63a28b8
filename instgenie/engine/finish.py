"""Turns a finished job into a picture: decodes at the model's size and composites at the picture's own. Takes no step.

Where the decoder allows it, only the part that compositing reads is decoded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instgenie.errors import ModelError
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import concat
from instgenie.models.model import Model, unpack_latents
from instgenie.models.vae.autoencoder import decode_latents
from instgenie.models.vae.region import can_decode_boxes, decode_box
from instgenie.pictures.compositing import composited, paint, whole_picture
from instgenie.pictures.matching import ring_width
from instgenie.types import Edit, OwnPixels, PixelMask, Pixels


@torch.inference_mode()
def finish(job: Job, model: Model) -> OwnPixels:
    [picture] = finish_many([job], model)
    return picture


@torch.inference_mode()
def finish_many(jobs: Sequence[Job], model: Model) -> list[OwnPixels]:
    """Finish jobs that share one grid."""
    edits = [job.edit for job in jobs]
    rings = [ring_width(edit.whole is not None) for edit in edits]
    decoded = decode([job.latents for job in jobs], [edit.mask for edit in edits], jobs[0].grid, model, rings)
    return [paint_edit(*pair) for pair in zip(edits, decoded, strict=True)]


def paint_edit(edit: Edit, decoded: Pixels) -> OwnPixels:
    whole = edit.whole or whole_picture(edit.picture, edit.source)
    return paint(whole, decoded, edit.mask, edit.feather, edit.seed)


def decode(
    latents: Sequence[Tensor],
    masks: Sequence[PixelMask],
    grid: tuple[int, int],
    model: Model,
    rings: Sequence[int] | None = None,
) -> NDArray[np.uint8]:
    """Decode latents at the model's size [pictures, height, width, 3]. Pixels that compositing under a picture's mask
    does not read may be black; it reads a ring of so many pixels around the mask, by default none."""
    rings = rings or [0] * len(masks)
    unpacked = concat([unpack_latents(model.denormalized(one), grid, model.latents_per_token) for one in latents])
    if not can_decode_boxes(model.vae):
        return to_pixels(decode_latents(model.vae, unpacked.to(model.dtype)))
    height, width = (side * model.patch for side in grid)
    pictures = np.zeros((len(latents), height, width, 3), np.uint8)
    for picture, one, mask, ring in zip(pictures, unpacked.to(model.dtype).split(1), masks, rings, strict=True):
        box = composited(mask, (height, width), ring)
        [pixels] = to_pixels(decode_box(model.vae, one, box))
        picture[box.rows.start : box.rows.stop, box.cols.start : box.cols.stop] = pixels
    return pictures


def to_pixels(decoded: Tensor) -> NDArray[np.uint8]:
    """[pictures, 3, height, width] in [-1, 1] -> [pictures, height, width, 3]. Raises a ModelError for values that are
    no numbers, which would become black pixels."""
    if not decoded.isfinite().all():
        num_broken = int((~decoded.isfinite()).sum())
        raise ModelError(f"{num_broken} of {decoded.numel()} values that the model computed are not finite numbers")
    pixels: NDArray[np.uint8] = (
        ((decoded.float() / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    )
    return pixels

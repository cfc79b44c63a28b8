"""Turns an edit into a job: the picture into latents, prompts into embeddings, seeds into noise. Takes no step.

Noise is drawn on the CPU, so that a result depends neither on the device nor on the other jobs.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instgenie.engine.adapting import PromptLoras
from instgenie.errors import EditError
from instgenie.jobs.controls import JobControl
from instgenie.jobs.job import Branch, Job, Template
from instgenie.jobs.tokens import concat
from instgenie.models.model import NOTHING, Model, Seen, pack_latents
from instgenie.models.vae.autoencoder import encode_pictures
from instgenie.pictures.mask import token_mask
from instgenie.pictures.picture import check_edit
from instgenie.pictures.resizing import resize_mask, resize_picture, working_size
from instgenie.pictures.surroundings import with_surroundings
from instgenie.types import ControlUse, Edit, PixelMask, Pixels

MAX_ENCODINGS = 64


class Encodings:
    """Remembers encoded templates, surroundings and prompts. The one used least recently is dropped first."""

    def __init__(self, max_items: int = MAX_ENCODINGS) -> None:
        self.max_items = max_items
        self._items: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._items:
            self._items[key] = make()
        self._items.move_to_end(key)
        if len(self._items) > self.max_items:
            self._items.popitem(last=False)
        return self._items[key]


@torch.inference_mode()
def prepare(
    edit: Edit, model: Model, encodings: Encodings | None = None, prompt_loras: PromptLoras | None = None
) -> Job:
    check_edit(edit)
    size = choose_size(edit, model)
    return make_job(edit, resize_mask(edit.mask, size), size, model, encodings, prompt_loras)


def make_job(
    edit: Edit,
    mask: PixelMask,
    size: tuple[int, int],
    model: Model,
    encodings: Encodings | None = None,
    prompt_loras: PromptLoras | None = None,
    branches: tuple[Branch, ...] = (),
) -> Job:
    """Make a job. `mask` has the `size` that the model works at. The parts of LoRAs that prompts pass are applied here;
    the others come later. With `branches` the prompts of the edit are not encoded."""
    encodings = encodings or Encodings()
    grid = size[0] // model.patch, size[1] // model.patch
    pixels = resize_picture(edit.picture, size)
    picture = picture_tensor(pixels, model.device)
    seed = template_seed(edit.picture, size)
    template = encodings.get(
        ("template", seed), lambda: Template(encode(picture, model), draw_noise(seed, grid, model))
    )
    prompts = edit.prompt, edit.negative_prompt if model.guidance_scale(edit) > 1 else None
    versions = tuple((lora.version, lora.scale) for lora in edit.loras)
    check_references(edit, model)
    seen = find_seen(edit, size, model)
    shown = tuple(template_seed(one, size) for one in seen.pictures) if model.reads_pictures else ()

    def encode_prompts() -> tuple[Branch, ...]:
        with prompt_loras.applied(edit.loras) if prompt_loras else nullcontext():
            return model.branches(edit, grid, seen)

    prompts_key = "prompts", prompts, grid, seen.grids, shown, versions, bool(edit.controls)
    masked = torch.tensor(token_mask(mask, model.patch), device=model.device).reshape(-1, 1)
    schedule = model.schedule(edit, len(masked))
    content = template.clean
    if edit.masked_content == "surroundings" and edit.strength < 1:
        key = "surroundings", seed, hashlib.sha256(mask.tobytes()).digest()
        content = encodings.get(key, lambda: encode_surroundings(pixels, mask, model))
    start = schedule.start(content, draw_noise(edit.seed, grid, model))
    return Job(
        edit=edit,
        grid=grid,
        template=template,
        masked=masked,
        conditioning=condition(picture, mask, masked, template, model),
        branches=branches or encodings.get(prompts_key, encode_prompts),
        scale=model.guidance_scale(edit),
        keeps_norm=model.keeps_norm,
        schedule=schedule,
        latents=torch.where(masked, start, template.at(0, schedule)),
        reference=find_reference(edit, size, template, model, encodings),
        controls=tuple(
            JobControl(use, make_hint(use, image, size, model))
            for use, image in zip(edit.controls, edit.control_images, strict=True)
        ),
    )


def make_hint(use: ControlUse, image: Pixels, size: tuple[int, int], model: Model) -> Tensor:
    """What a ControlNet sees of its image."""
    pixels = picture_tensor(resize_picture(image, size), model.device)
    if use.reads_latents:
        return encode(pixels, model)
    return pixels[0] if model.guided.signed else (pixels[0] + 1) / 2


def find_reference(
    edit: Edit, size: tuple[int, int], template: Template, model: Model, encodings: Encodings
) -> Tensor | None:  # [reference tokens, channels]
    """The tokens that the network sees beside those that it computes: those of the picture, of the edit's references,
    or of both."""
    if not sees_picture(edit, model):
        return None
    pairs = zip(edit.references, reference_sizes(edit, size, model), strict=True)
    tokens = [encodings.get(("reference", template_seed(*pair)), partial(encode_at, *pair, model)) for pair in pairs]
    return concat([template.clean, *tokens] if shows_picture(edit, model) else tokens)


def sees_picture(edit: Edit, model: Model) -> bool:
    """Return whether the network sees the picture, or a reference, as further tokens."""
    return model.sees_picture and (not edit.from_nothing or len(edit.references) > 0)


def shows_picture(edit: Edit, model: Model) -> bool:
    """Return whether the picture is among what the network sees as further tokens: with references, only if they do not
    stand in its place."""
    return not edit.from_nothing and (not edit.references or not model.references_replace)


def find_seen(edit: Edit, size: tuple[int, int], model: Model) -> Seen:
    """What the network sees beside the tokens that it computes."""
    if not sees_picture(edit, model):
        return NOTHING
    is_shown = shows_picture(edit, model)
    sizes = [size] * is_shown + reference_sizes(edit, size, model)
    grids = tuple((height // model.patch, width // model.patch) for height, width in sizes)
    return Seen(grids, (edit.picture,) * is_shown + edit.references)


def reference_sizes(edit: Edit, size: tuple[int, int], model: Model) -> list[tuple[int, int]]:
    """A reference keeps its shape and has about as many tokens as the picture."""
    side = model.patch * math.ceil(math.sqrt(size[0] * size[1]) / model.patch)
    shapes = [picture.shape for picture in edit.references]
    return [working_size(height, width, model.size_multiple, side) for height, width, _ in shapes]


def check_references(edit: Edit, model: Model) -> None:
    num, most = len(edit.references), model.max_references
    if num > most:
        pictures, takes = "picture" if num == 1 else "pictures", f"at most {most}" if most else "none"
        raise EditError(f"the edit has {num} {pictures} beside the edited one: this model takes {takes}")


def encode_at(picture: Pixels, size: tuple[int, int], model: Model) -> Tensor:
    return encode(picture_tensor(resize_picture(picture, size), model.device), model)


def encode_surroundings(picture: Pixels, mask: PixelMask, model: Model) -> Tensor:  # [tokens, channels]
    """The picture with what surrounds the mask in the place of its masked part."""
    return encode(picture_tensor(with_surroundings(picture, mask), model.device), model)


def choose_size(edit: Edit, model: Model) -> tuple[int, int]:
    if edit.size is None:
        height, width = edit.picture.shape[:2]
        return check_side(working_size(height, width, model.size_multiple, model.own_size), model)
    height, width = edit.size
    if height % model.size_multiple or width % model.size_multiple:
        raise EditError(
            f"the working size is {edit.size}: multiples of {model.size_multiple}, for this model, are expected"
        )
    return check_side((height, width), model)


def check_side(size: tuple[int, int], model: Model) -> tuple[int, int]:
    if model.max_side is not None and max(size) > model.max_side:
        raise EditError(f"the working size is {size}: this model takes sides up to {model.max_side} pixels")
    return size


def template_seed(picture: Pixels, size: tuple[int, int]) -> int:
    """The seed of a template's noise. It depends only on the picture and on the size the model works at."""
    digest = hashlib.sha256(f"{picture.shape} {size}".encode())
    digest.update(picture.tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def draw_noise(seed: int, grid: tuple[int, int], model: Model) -> Tensor:  # [tokens, channels]
    generator = torch.Generator().manual_seed(seed)
    side = model.latents_per_token
    noise = torch.randn(1, model.latent_channels, side * grid[0], side * grid[1], generator=generator)
    return pack_latents(noise, side).to(model.device)


def condition(picture: Tensor, mask: PixelMask, masked: Tensor, template: Template, model: Model) -> Tensor:
    """The channels that fill models see beside the latents. A masked token sees the picture with the hole greyed out
    and the pixels of the mask; any other token sees the template as it is and an empty mask."""
    if not model.is_fill:
        return template.clean[:, :0]
    pixels = torch.tensor(np.ascontiguousarray(mask)).to(picture)[None, None]  # [1, 1, height, width]
    hole = model.beside(encode(picture * (1 - pixels), model), pixels)
    return torch.where(masked, hole, model.beside(template.clean, torch.zeros_like(pixels)))


def picture_tensor(picture: Pixels, device: torch.device) -> Tensor:  # [1, 3, height, width] in [-1, 1]
    pixels = torch.tensor(np.ascontiguousarray(picture), device=device)  # copied as bytes
    return 2 * (pixels.permute(2, 0, 1)[None] / 255) - 1


def encode(picture: Tensor, model: Model) -> Tensor:  # [tokens, channels]
    latents = encode_pictures(model.vae, picture.to(model.dtype)).float()
    return model.normalized(pack_latents(latents, model.latents_per_token))

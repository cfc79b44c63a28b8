"""Tiny random ControlNets for the tiny models, and diffusers' pipelines with them."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
)

from helpers.families import widen
from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.models.flux.model import FluxModel, is_flux
from instgenie.models.model import Model
from instgenie.models.unet.model import UnetModel, UnetXlModel
from instgenie.types import ControlUse, Edit, Pixels


def save_controlnet(folder: Path, model: Model, seed: int = 0, **fields: Any) -> Path:
    """Save a ControlNet that fits a model."""
    torch.manual_seed(seed)
    assert isinstance(model, UnetModel) or is_flux(model)
    network = unet_controlnet(model, **fields) if isinstance(model, UnetModel) else flux_controlnet(model, **fields)
    widen(network)
    network.save_pretrained(folder)
    return folder


def unet_controlnet(model: UnetModel, **fields: Any) -> ControlNetModel:
    config = model.unet.config
    names = (
        "down_block_types", "block_out_channels", "layers_per_block", "norm_num_groups", "cross_attention_dim",
        "attention_head_dim", "transformer_layers_per_block", "use_linear_projection", "upcast_attention",
        "addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim",
    )  # fmt: skip
    own = {name: config[name] for name in names}
    return ControlNetModel(
        **own | {"in_channels": model.latent_channels, "conditioning_embedding_out_channels": (4, 8, 8)} | fields
    )


def flux_controlnet(model: FluxModel, **fields: Any) -> FluxControlNetModel:
    config = model.transformer.config
    names = (
        "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim", "guidance_embeds",
        "axes_dims_rope",
    )  # fmt: skip
    own = {name: config[name] for name in names}
    depth = {"num_layers": 1, "num_single_layers": 1}
    with quiet_flux():
        return FluxControlNetModel(**own | depth | {"in_channels": 4 * model.latent_channels} | fields)


@contextmanager
def quiet_flux() -> Iterator[None]:
    """A ControlNet of Flux uses a class that diffusers warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def control_image(edit: Edit, seed: int = 0) -> Pixels:
    """A random image of the picture's size."""
    return np.random.default_rng(100 + seed).integers(0, 256, edit.picture.shape, dtype=np.uint8)


def controlled(edit: Edit, *uses: tuple[Path, dict[str, Any]]) -> Edit:
    """The edit with ControlNets and random images."""
    registry = ControlNetRegistry({str(number): str(path) for number, (path, _) in enumerate(uses)})
    asked = [ControlUse(str(number), **fields) for number, (_, fields) in enumerate(uses)]
    images = tuple(control_image(edit, number) for number in range(len(uses)))
    return edit.__class__(**vars(edit) | {"controls": registry.resolve(asked), "control_images": images})


def controlnet_pipeline(model: Model, folders: Sequence[Path]) -> DiffusionPipeline:
    """diffusers' inpainting pipeline with ControlNets."""
    kind = FluxControlNetModel if is_flux(model) else ControlNetModel
    with quiet_flux():
        nets = [kind.from_pretrained(folder).to(model.device, model.dtype) for folder in folders]
    net = nets[0] if len(nets) == 1 else nets
    parts = model.parts | {"controlnet": net}
    if is_flux(model):
        pipeline = FluxControlNetInpaintPipeline(**parts)
    elif isinstance(model, UnetXlModel):
        pipeline = StableDiffusionXLControlNetInpaintPipeline(
            **parts, force_zeros_for_empty_prompt=model.empty_is_zero, add_watermarker=False
        )
    else:
        pipeline = StableDiffusionControlNetInpaintPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

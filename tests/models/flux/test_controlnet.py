"""Kinds of Flux ControlNets beside the plain one: those that know several kinds of images, and those that see pixels.
The truth is diffusers' pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from helpers.controlnets import controlled, controlnet_pipeline, save_controlnet
from helpers.edits import CLOSE, apart, make_edit, run, stock_arguments
from helpers.families import make_flux, tiny_kl
from PIL import Image
from torch import Tensor

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.engine.prepare import draw_noise, prepare
from instgenie.errors import ControlError
from instgenie.models.joint.controls import residual_behind
from instgenie.models.loading.load import load
from instgenie.models.model import Model, unpack_latents
from instgenie.types import ControlUse, Edit


def make_model(folder: Path, num_levels: int) -> Model:
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=3, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    make_flux(FluxPipeline, transformer, tiny_kl(num_levels=num_levels), scheduler, 5).save_pretrained(folder)
    return load(str(folder), "cpu", "float32")


def stock_latents(model: Model, edit: Edit, net: Path, **told: Any) -> Tensor:
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    noise = unpack_latents(draw_noise(edit.seed, grid, model), grid)
    pipeline = controlnet_pipeline(model, [net])
    encode = pipeline.vae.encode

    def encode_mean(picture: Tensor) -> Any:
        found = encode(picture)
        found.latent_dist.sample = lambda generator=None: found.latent_dist.mode()
        return found

    pipeline.vae.encode = encode_mean
    latents: Tensor = pipeline(
        **stock_arguments(edit),
        control_image=Image.fromarray(edit.control_images[0]),
        controlnet_conditioning_scale=edit.controls[0].scale,
        max_sequence_length=model.num_text_tokens,
        latents=noise,
        **told,
    ).images[0]
    pipeline.vae.encode = encode
    return latents


def test_one_that_knows_several_kinds_of_images(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_levels=2)
    net = save_controlnet(tmp_path / "net", model, num_mode=3, num_layers=2)
    edit = controlled(make_edit(share=1.0), (net, {"scale": 0.7, "mode": 1}))
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, net, control_mode=1)) <= CLOSE
    other = edit.controls[0]._replace(mode=2)
    [others] = run(model, [Edit(**vars(edit) | {"controls": (other,)})])
    assert apart(latents, others) > CLOSE
    registry = ControlNetRegistry({"union": str(net)})
    with pytest.raises(ControlError, match="is None: a number from 0 to 2"):
        registry.resolve([ControlUse("union")])
    with pytest.raises(ControlError, match="is 3: a number from 0 to 2"):
        registry.resolve([ControlUse("union", mode=3)])


def test_one_that_sees_pixels(tmp_path: Path) -> None:
    """Its residuals take turns behind the double blocks."""
    model = make_model(tmp_path / "model", num_levels=4)
    fields = {"conditioning_embedding_channels": 4, "patch_size": 2, "num_layers": 2, "num_single_layers": 0}
    net = save_controlnet(tmp_path / "net", model, **fields)
    edit = controlled(make_edit(share=1.0, size=(64, 96)), (net, {"scale": 0.7}))
    assert not edit.controls[0].reads_latents
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, net)) <= CLOSE


def test_residuals_are_spread_over_the_blocks_as_diffusers_does(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_levels=2)
    net = save_controlnet(tmp_path / "net", model, num_layers=2, num_single_layers=2)
    edit = controlled(make_edit(share=1.0), (net, {"scale": 0.7}))
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, net)) <= CLOSE
    job = prepare(edit, model)
    assert [residual_behind(block, job, (3, 3)) for block in range(6)] == [0, 0, 1, 2, 2, 3]

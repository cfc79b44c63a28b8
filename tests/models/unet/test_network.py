"""The first law on UNets, and tests of UNets alone.

Full mask, no cache == diffusers' stock inpainting pipelines; partial mask == a plain loop over diffusers' UNet and its
scheduler's own stepping.
"""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.edits import CLOSE, apart, close, far, make_edit, quiet_pipeline, run, stock_arguments
from helpers.names import UNET_FAMILIES
from PIL import Image
from torch import Tensor

from instgenie.engine.prepare import draw_noise, prepare, template_seed
from instgenie.engine.register import register, reuse
from instgenie.errors import EditError
from instgenie.models.model import Model, unpack_latents
from instgenie.models.unet.model import UnetModel, UnetXlModel
from instgenie.types import Edit


@pytest.fixture(params=UNET_FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> UnetModel:
    return models[request.param]


def as_tokens(latents: Tensor) -> Tensor:
    return latents[0].flatten(1).T


def noise_of(seed: int, edit: Edit, model: UnetModel) -> Tensor:  # [1, channels, rows, columns]
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    return unpack_latents(draw_noise(seed, grid, model), grid, 1).to(model.dtype)


def encode(model: UnetModel, picture: Tensor) -> Tensor:
    """Encode to the mean; the stock pipelines sample from the autoencoder's distribution."""
    return model.vae.encode(picture).latent_dist.mode() * model.vae.config.scaling_factor


@torch.no_grad()
def stock_latents(model: UnetModel, edit: Edit, **options: Any) -> Tensor:
    height, width = edit.picture.shape[:2]
    nothing = torch.zeros(1, 3, height, width, device=model.device, dtype=model.dtype)
    hole = {"masked_image_latents": encode(model, nothing)} if model.is_fill else {}
    noise = noise_of(edit.seed, edit, model)
    given = stock_arguments(edit) | {"negative_prompt": edit.negative_prompt} | hole | options
    return as_tokens(quiet_pipeline(model)(**given, latents=noise).images).float()


@torch.no_grad()
def plain_loop(model: UnetModel, edit: Edit) -> Tensor:
    """Edit with diffusers' UNet and scheduler, computing every token; unmasked tokens are reset after each step."""
    pipeline = quiet_pipeline(model)
    scheduler, unet, is_xl = pipeline.scheduler, model.unet, isinstance(model, UnetXlModel)
    height, width = edit.picture.shape[:2]
    here = {"device": model.device, "dtype": model.dtype}
    picture = pipeline.image_processor.preprocess(Image.fromarray(edit.picture)).to(**here)
    pixels = torch.tensor(edit.mask)[None, None].to(**here)
    inside = torch.nn.functional.max_pool2d(pixels, model.patch) > 0
    clean, noise = encode(model, picture), noise_of(template_seed(edit.picture, (height, width)), edit, model)
    start = noise_of(edit.seed, edit, model)

    beside = clean[:, :0]
    if model.is_fill:
        mask = torch.nn.functional.interpolate(pixels, size=clean.shape[2:])
        hole = torch.cat([mask, encode(model, picture * (1 - pixels))], dim=1)
        beside = torch.where(inside, hole, torch.cat([torch.zeros_like(mask), clean], dim=1))

    scheduler.set_timesteps(edit.steps, device=model.device)
    timesteps, _ = pipeline.get_timesteps(edit.steps, edit.strength, model.device)
    first = timesteps[:1]
    begun = scheduler.add_noise(clean, start, first)
    x = torch.where(
        inside,
        start * scheduler.init_noise_sigma if edit.strength == 1 else begun,
        scheduler.add_noise(clean, noise, first),
    )
    is_guided = edit.guidance > 1
    encoded = pipeline.encode_prompt(
        prompt=edit.prompt, negative_prompt=edit.negative_prompt, device=model.device, num_images_per_prompt=1,
        do_classifier_free_guidance=is_guided,
    )  # fmt: skip
    texts = [(encoded[0], encoded[2] if is_xl else None), (encoded[1], encoded[3] if is_xl else None)]
    sizes = torch.tensor([[height, width, 0, 0, height, width]]).to(**here)
    for number, timestep in enumerate(timesteps):
        seen = torch.cat([scheduler.scale_model_input(x, timestep), beside], dim=1)
        positive, *negative = [
            unet(seen, timestep, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}).sample
            for text, pooled in texts[: 1 + is_guided]
        ]
        guided = negative[0] + edit.guidance * (positive - negative[0]) if negative else positive
        x = scheduler.step(guided, timestep, x, return_dict=False)[0]
        is_last = number == len(timesteps) - 1
        outside = clean if is_last else scheduler.add_noise(clean, noise, timesteps[number + 1 : number + 2])
        x = torch.where(inside, x, outside)
    return as_tokens(x).float()


def nearness(model: UnetModel, latents: Tensor) -> float:
    """The tolerance; Euler's latents start large."""
    return CLOSE * latents.abs().max().item() if model.dtype == torch.float32 else close(model)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_law_1_full_mask_is_the_stock_pipeline(model: UnetModel, guidance: float) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit)) <= nearness(model, latents)
    assert latents.std() > 0.1
    assert apart(latents, stock_latents(model, dataclasses.replace(edit, prompt="a blue dog on grass"))) > far(model)


def test_law_1_sizes_in_one_pass_are_the_stock_pipeline(model: UnetModel) -> None:
    """With all tiles active, whatever the sizes."""
    tiled = model.with_convolutions("tiled")
    given = {"share": 1.0, "guidance": 2.5, "negative_prompt": "nothing blue"}
    edits = [make_edit(size=size, **given) for size in ((32, 48), (64, 32))]
    jobs = [prepare(edit, tiled) for edit in edits]
    assert len(tiled.passes(jobs)) == 1
    for edit, latents in zip(edits, run(tiled, jobs), strict=True):
        assert apart(latents, stock_latents(model, edit)) <= nearness(model, latents)


def test_no_negative_prompt_is_the_stock_pipelines_none(model: UnetModel) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=4.0)
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit, negative_prompt=None)) <= CLOSE * latents.abs().max()


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_law_1_partial_mask_is_a_plain_loop(model: UnetModel, guidance: float, strength: float) -> None:
    edit = make_edit(steps=5, seed=7, guidance=guidance, negative_prompt="nothing blue", strength=strength)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= nearness(model, latents)
    assert apart(latents, plain_loop(model, dataclasses.replace(edit, seed=8))) > far(model)
    other_mask = dataclasses.replace(edit, mask=edit.mask[::-1].copy())
    assert apart(latents, plain_loop(model, other_mask)) > far(model)


def test_guidance_is_true_guidance(model: UnetModel) -> None:
    either = [make_edit(guidance=2.5), make_edit(true_guidance=2.5, guidance=9.0)]
    assert torch.equal(*run(model, either[:1]), *run(model, either[1:]))
    assert [len(prepare(make_edit(guidance=scale), model).branches) for scale in (0.0, 1.0, 1.5)] == [1, 1, 2]


def test_sizes_can_be_halved_at_every_level(models: dict[str, Model]) -> None:
    assert [models[family].size_multiple for family in UNET_FAMILIES] == [16, 8, 8]
    assert [models[family].patch for family in UNET_FAMILIES] == [4, 4, 4]


def test_more_steps_than_the_model_was_trained_for(model: UnetModel) -> None:
    with pytest.raises(EditError, match="at most 1000"):
        model.schedule(make_edit(steps=1001), 64)


def test_levels_are_max_pooled(model: UnetModel) -> None:
    job = prepare(make_edit(size=(64, 64)), model)
    masked = job.masked.view(job.grid)
    coarse = masked.view(8, 2, 8, 2).any(3).any(1).flatten()
    level = job.level(64)
    assert torch.equal(level.inside, coarse.nonzero()[:, 0])
    assert torch.equal(level.outside, (~coarse).nonzero()[:, 0])
    assert torch.equal(job.level(256).inside, job.inside)


def test_jobs_that_compute_every_token_pass_apart(model: UnetModel) -> None:
    """The branches of a pass then have one length, and attend in one call."""
    edit = make_edit(size=(64, 64), steps=4)
    activations = register(edit.picture, model, (64, 64), 4)
    dense = prepare(edit, model)
    cached = [reuse(prepare(dataclasses.replace(edit, seed=seed), model), activations) for seed in range(2)]
    late = reuse(prepare(dataclasses.replace(edit, dense_steps=2), model), activations)
    assert model.passes([cached[0], dense, late, cached[1]]) == [cached, [dense, late]]
    late.step = 2
    assert model.passes([late, dense]) == [[late], [dense]]

"""The laws of the engine, on every model family.

The truth they are held against is diffusers: its stock pipelines where the mask is everything, else a plain loop over
its transformer and its scheduler's own stepping.
"""

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest
import torch
from helpers.edits import apart, close, far, make_edit, mixed_edits, prepare, quiet_pipeline, run, stock_arguments
from helpers.names import FLUX_FAMILIES, SHORT
from PIL import Image
from torch import Tensor

from instgenie.editor import Editor, make_store
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import draw_noise, template_seed
from instgenie.jobs.job import Job
from instgenie.models.flux.model import FluxModel
from instgenie.models.model import Model, unpack_latents
from instgenie.pictures.surroundings import with_surroundings
from instgenie.types import Edit, Result


@pytest.fixture(params=[*FLUX_FAMILIES, SHORT])
def flux(request: pytest.FixtureRequest, models: dict[str, Model]) -> FluxModel:
    return models[request.param]


def stock_latents(model: FluxModel, edit: Edit) -> Tensor:
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    noise = draw_noise(edit.seed, grid, model).to(model.dtype)
    true = {"true_cfg_scale": edit.true_guidance, "negative_prompt": edit.negative_prompt}
    given = stock_arguments(edit) | model.stock_arguments | ({} if model.is_fill else true)
    start = noise[None] if model.is_fill else unpack_latents(noise, grid)
    latents: Tensor = quiet_pipeline(model)(**given, latents=start).images[0]
    return latents.float()


@torch.no_grad()
def plain_loop(model: FluxModel, edit: Edit) -> Tensor:
    """Edit with diffusers' transformer and scheduler, token by token; unmasked tokens are reset after each step."""
    pipeline = quiet_pipeline(model)
    height, width = edit.picture.shape[:2]
    rows, cols = height // model.patch, width // model.patch
    scale = model.pixels_per_latent

    def pack(latents: Tensor) -> Tensor:
        return pipeline._pack_latents(latents, 1, latents.shape[1], 2 * rows, 2 * cols)

    def encode(pixels: Tensor) -> Tensor:
        encoded = model.vae.encode(pixels)
        latents = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.mode()
        return pack((latents - model.vae.config.shift_factor) * model.vae.config.scaling_factor)

    here = {"device": model.device, "dtype": model.dtype}
    picture = pipeline.image_processor.preprocess(Image.fromarray(edit.picture)).to(**here)
    mask = torch.tensor(edit.mask)[None, None].to(**here)
    inside = torch.nn.functional.max_pool2d(mask, model.patch).view(1, -1, 1) > 0
    clean = encode(picture)
    noise = draw_noise(template_seed(edit.picture, (height, width)), (rows, cols), model)[None].to(**here)

    beside, further = clean[..., :0], [clean] if model.sees_picture else []
    if model.is_fill:
        pixels, hole = pipeline.prepare_mask_latents(
            mask, picture * (1 - mask), 1, model.latent_channels, 1, height, width, model.dtype, model.device, None
        )
        whole = torch.cat([clean, torch.zeros(1, rows * cols, 4 * scale**2, **here)], dim=2)
        beside = torch.where(inside, torch.cat([hole, pixels], dim=2), whole)

    scheduler = pipeline.scheduler
    mu = 0.5 + (1.15 - 0.5) * (rows * cols - 256) / (4096 - 256)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / edit.steps, edit.steps), mu=mu, device=model.device)
    skipped = int(edit.steps - edit.steps * edit.strength)
    scheduler.set_begin_index(skipped)
    sigmas = scheduler.sigmas[skipped:].tolist()
    drawn = draw_noise(edit.seed, (rows, cols), model)[None].to(**here)
    content = clean
    if edit.masked_content == "surroundings":
        shown = with_surroundings(edit.picture, edit.mask)  # the working size is the picture's own
        content = encode(pipeline.image_processor.preprocess(Image.fromarray(shown)).to(**here))
    x = sigmas[0] * torch.where(inside, drawn, noise) + (1 - sigmas[0]) * torch.where(inside, content, clean)

    prompts = [edit.prompt, edit.negative_prompt] if edit.true_guidance > 1 else [edit.prompt]
    texts = [pipeline.encode_prompt(text, text, max_sequence_length=model.num_text_tokens) for text in prompts]
    positions = pipeline._prepare_latent_image_ids(1, rows, cols, **here)
    if model.sees_picture:
        positions = torch.cat([positions, positions + torch.tensor([1, 0, 0], **here)])
    guidance = torch.tensor([edit.guidance], device=model.device) if model.transformer.config.guidance_embeds else None
    for timestep, sigma_next in zip(scheduler.timesteps[skipped:], sigmas[1:], strict=True):
        first, *rest = [
            model.transformer(
                hidden_states=torch.cat([torch.cat([x, beside], dim=2), *further], dim=1),
                timestep=timestep[None].to(model.dtype) / 1000, guidance=guidance, pooled_projections=pooled,
                encoder_hidden_states=sequence, txt_ids=text_positions, img_ids=positions,
            ).sample[:, : x.shape[1]]
            for sequence, pooled, text_positions in texts
        ]  # fmt: skip
        velocity = rest[0] + edit.true_guidance * (first - rest[0]) if rest else first
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        x = torch.where(inside, x, (1 - sigma_next) * clean + sigma_next * noise)
    return x[0].float()


def own_edit(model: Model, divided_by: int = 1, **fields: object) -> Edit:
    """An edit at the built-in model's own size or a fraction of it; the tiny models work at any size."""
    side = model.own_size // divided_by
    return make_edit(**({"size": (side, side) if model.name == "builtin" else (32, 48), "seed": 7} | fields))


# FluxFillPipeline has no true guidance.
@pytest.mark.parametrize(
    ("family", "true_guidance"),
    [
        ("blend", 1.0),
        ("blend", 2.5),
        ("blend_guided", 1.0),
        ("blend_guided", 2.5),
        ("fill", 1.0),
        ("builtin", 1.0),
        ("kontext", 1.0),
        ("kontext", 2.5),
    ],
)
def test_law_1_full_mask_is_the_stock_pipeline(models: dict[str, Model], family: str, true_guidance: float) -> None:
    model = models[family]
    edit = own_edit(model, share=1.0, true_guidance=true_guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit)) <= close(model)
    assert latents.std() > 0.1
    assert apart(latents, stock_latents(model, dataclasses.replace(edit, prompt="a blue dog on grass"))) > far(model)


@pytest.mark.parametrize(("strength", "content"), [(1.0, "original"), (0.6, "original"), (0.6, "surroundings")])
@pytest.mark.parametrize("true_guidance", [1.0, 2.5])
def test_law_1_partial_mask_is_a_plain_loop(
    flux: FluxModel, true_guidance: float, strength: float, content: str
) -> None:
    model = flux
    fields = {"true_guidance": true_guidance, "negative_prompt": "nothing blue", "strength": strength}
    fields["masked_content"] = content
    edit = own_edit(model, divided_by=2, steps=5, **fields)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= close(model)
    if true_guidance > 1:
        return
    assert apart(latents, plain_loop(model, dataclasses.replace(edit, seed=8))) > far(model)
    other_mask = dataclasses.replace(edit, mask=edit.mask[::-1].copy())
    assert apart(latents, plain_loop(model, other_mask)) > far(model)


@cache
def mixed_alone(model: Model) -> list[Tensor]:
    """The final latents of each mixed edit that runs alone."""
    return [run(model, [edit])[0] for edit in mixed_edits()]


def test_law_2_batched_is_alone(model: Model) -> None:
    together, alone = run(model, mixed_edits()), mixed_alone(model)
    assert max(map(apart, together, alone)) <= close(model)
    same_size = [latents for latents in alone if latents.shape == alone[0].shape]
    assert min(itertools.starmap(apart, itertools.combinations(same_size, 2))) > far(model)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 4, 1, 2, 0]])
def test_law_5_independent_of_arrival_and_of_others(model: Model, order: list[int]) -> None:
    alone, jobs = mixed_alone(model), [prepare(edit, model) for edit in mixed_edits()]
    gives_up = prepare(make_edit(steps=9, seed=9), model)
    engine = Engine(model, max_jobs=3)
    engine.join(gives_up)
    arrivals = iter(order)
    finished: list[Job] = []
    while engine.jobs:
        if (arrival := next(arrivals, None)) is not None:
            engine.join(jobs[arrival])
        finished += engine.step().finished
        if gives_up.step == 2 and gives_up in engine.jobs:
            engine.leave(gives_up)
    assert set(finished) == set(jobs)
    assert max(apart(job.latents, latents) for job, latents in zip(jobs, alone, strict=True)) <= close(model)


def test_law_5_pictures_come_in_the_order_of_the_edits(model: Model) -> None:
    edits = mixed_edits()
    levels = (
        1 if model.dtype == torch.float32 else 255 * close(model)
    )  # the tolerance in levels: one rounding, more in bfloat16
    forward, backward = edit_many(model, edits), edit_many(model, edits[::-1])[::-1]
    for a, b, edit in zip(forward, backward, edits, strict=True):
        assert a.picture.shape == edit.picture.shape
        assert np.abs(a.picture.astype(int) - b.picture).max() <= levels


def test_unmasked_tokens_are_a_fact_of_the_template(model: Model) -> None:
    def inputs(**fields: object) -> tuple[Tensor, Tensor]:
        job = prepare(make_edit(**fields), model)
        outside = ~job.masked[:, 0]
        seen = torch.cat([job.latents, job.conditioning], dim=1)
        return seen[outside], seen[~outside]

    outside, inside = inputs(seed=1, prompt="a red cat")
    outside_again, inside_again = inputs(seed=2, prompt="sky", guidance=9.0, true_guidance=2.0)
    assert torch.equal(outside, outside_again)
    assert apart(inside, inside_again) > 0.1
    assert apart(outside, inputs(picture_seed=1)[0]) > 0.1
    assert template_seed(make_edit().picture, (32, 48)) != template_seed(make_edit().picture, (64, 96))
    assert template_seed(make_edit().picture, (32, 48)) != template_seed(make_edit(picture_seed=1).picture, (32, 48))


@pytest.mark.parametrize("feather", [0, 5])
def test_law_6_outside_the_mask_is_bit_identical(model: Model, feather: int) -> None:
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (131, 87, 3), dtype=np.uint8)
    mask = np.zeros((131, 87), dtype=np.bool_)
    mask[13:77, 9:58] = True
    mask[random.integers(0, 131, 20), random.integers(0, 87, 20)] = True
    job = prepare(Edit(picture, mask, "a red cat", steps=2, feather=feather, size=(48, 32)), model)
    engine = Engine(model)
    engine.join(job)
    while engine.jobs:
        engine.step()
    edited = finish(job, model)
    assert edited.shape == picture.shape
    assert (edited[~mask] == picture[~mask]).all()
    assert (edited[mask] != picture[mask]).mean() > 0.5


def edit_many(model: Model, edits: list[Edit]) -> list[Result]:
    editor = Editor.__new__(Editor)  # with a model that is loaded already
    editor.model = model
    editor.store = make_store(model.device)
    return editor.edit_many(edits)

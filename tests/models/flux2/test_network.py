"""The first law on FLUX.2 klein, its forward pass against diffusers' own, its references, and what is refused.

Full mask, no cache == diffusers' stock pipelines; partial mask == a plain loop over diffusers' transformer and its
scheduler's own stepping.
"""

import copy
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from helpers.cached import KINDS, feasible, predict, register_for
from helpers.edits import apart, close, far, make_edit, mixed_edits, quiet_pipeline, run, stock_arguments
from helpers.families import klein
from PIL import Image
from torch import Tensor

from instgenie.engine.prepare import draw_noise, prepare, template_seed
from instgenie.engine.register import can_reuse, reuse
from instgenie.errors import EditError, ModelError
from instgenie.jobs.activations import Kind
from instgenie.models.flux2.lora_names import original_names
from instgenie.models.flux2.model import Flux2DistilledModel, Flux2KleinModel, find_shift
from instgenie.models.loading.load import load
from instgenie.models.model import Model, pack_latents
from instgenie.types import Edit, Pixels


@pytest.fixture
def model(models: dict[str, Model]) -> Flux2KleinModel:
    return models["klein"]


@pytest.fixture
def distilled(model: Flux2KleinModel) -> Flux2DistilledModel:
    """The same weights, said to need no guidance."""
    return Flux2DistilledModel(**{field.name: getattr(model, field.name) for field in fields(model)})


def other_picture(seed: int = 5, size: tuple[int, int] = (48, 32)) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def noise_of(seed: int, edit: Edit, model: Flux2KleinModel) -> Tensor:  # [1, channels of a token, rows, columns]
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    return draw_noise(seed, grid, model).t().reshape(1, -1, *grid).to(model.dtype)


def as_tokens(latents: Tensor, model: Flux2KleinModel) -> Tensor:
    return model.normalized(pack_latents(latents.float()))


@torch.no_grad()
def stock_latents(model: Flux2KleinModel, edit: Edit, **options: object) -> Tensor:
    pipeline = quiet_pipeline(model)
    negative, _ = pipeline.encode_prompt(edit.negative_prompt, max_sequence_length=model.num_text_tokens)
    given = stock_arguments(edit) | model.stock_arguments | {"negative_prompt_embeds": negative} | options
    return as_tokens(pipeline(**given, latents=noise_of(edit.seed, edit, model)).images, model)


@torch.no_grad()
def stock_without_mask(model: Flux2KleinModel, edit: Edit, pictures: list[Pixels]) -> Tensor:
    """What the pipeline that knows no mask makes of pictures to look at."""
    pipeline = Flux2KleinPipeline(**quiet_pipeline(model).components, is_distilled=model.is_distilled)
    pipeline.set_progress_bar_config(disable=True)
    height, width = edit.picture.shape[:2]
    latents = pipeline(
        prompt=edit.prompt, image=[Image.fromarray(one) for one in pictures] or None, height=height, width=width,
        num_inference_steps=edit.steps, guidance_scale=edit.guidance, latents=noise_of(edit.seed, edit, model),
        max_sequence_length=model.num_text_tokens, output_type="latent",
    ).images  # fmt: skip
    return as_tokens(latents, model)


@torch.no_grad()
def plain_loop(model: Flux2KleinModel, edit: Edit) -> Tensor:
    """Edit with diffusers' transformer and scheduler, computing every token; unmasked tokens are reset after each
    step."""
    pipeline = quiet_pipeline(model)
    scheduler = pipeline.scheduler
    height, width = edit.picture.shape[:2]
    here = {"device": model.device, "dtype": model.dtype}
    picture = pipeline.image_processor.preprocess(Image.fromarray(edit.picture)).to(**here)
    pixels = torch.tensor(edit.mask)[None, None].to(**here)
    inside = torch.nn.functional.max_pool2d(pixels, model.patch).view(1, -1, 1) > 0
    clean = pipeline._encode_vae_image(picture, None)
    positions = torch.cat([pipeline._prepare_latent_ids(clean), pipeline._prepare_image_ids([clean], 1)], dim=1).to(
        model.device
    )
    clean, noise, drawn = (
        pipeline._pack_latents(one)
        for one in (
            clean,
            noise_of(template_seed(edit.picture, (height, width)), edit, model),
            noise_of(edit.seed, edit, model),
        )
    )

    num_tokens = clean.shape[1]
    mu = compute_empirical_mu(num_tokens, edit.steps)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / edit.steps, edit.steps), mu=mu, device=model.device)
    timesteps, _ = pipeline.get_timesteps(edit.steps, edit.strength, model.device)
    sigmas = scheduler.sigmas[-len(timesteps) - 1 :].tolist()
    x = sigmas[0] * torch.where(inside, drawn, noise) + (1 - sigmas[0]) * clean

    prompts = [edit.prompt, edit.negative_prompt][: 1 + (edit.guidance > 1)]
    texts = [pipeline.encode_prompt(prompt, max_sequence_length=model.num_text_tokens) for prompt in prompts]
    for timestep, sigma_next in zip(timesteps, sigmas[1:], strict=True):
        positive, *negative = [
            model.transformer(
                hidden_states=torch.cat([x, clean], dim=1), timestep=timestep[None].to(model.dtype) / 1000,
                encoder_hidden_states=sequence, txt_ids=text_positions, img_ids=positions,
            ).sample[:, :num_tokens]
            for sequence, text_positions in texts
        ]  # fmt: skip
        velocity = negative[0] + edit.guidance * (positive - negative[0]) if negative else positive
        x = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        x = torch.where(inside, x, (1 - sigma_next) * clean + sigma_next * noise)
    return x[0].float()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_law_1_full_mask_is_the_stock_pipeline(model: Flux2KleinModel, guidance: float) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=guidance, negative_prompt="nothing blue")
    [latents] = run(model, [edit])
    assert apart(latents, stock_latents(model, edit)) <= close(model)
    assert latents.std() > 0.1
    assert apart(latents, stock_latents(model, replace(edit, prompt="a blue dog on grass"))) > far(model)


def test_law_1_distilled_models_have_no_guidance(distilled: Flux2DistilledModel) -> None:
    edit = make_edit(share=1.0, seed=7, guidance=4.0, negative_prompt="nothing blue")
    [latents] = run(distilled, [edit])
    assert apart(latents, stock_latents(distilled, edit)) <= close(distilled)
    assert torch.equal(latents, *run(distilled, [replace(edit, guidance=1.0)]))
    assert apart(latents, *run(distilled, [replace(edit, true_guidance=4.0)])) > far(distilled)


@pytest.mark.parametrize("num_references", [1, 2])
def test_law_1_references_come_after_the_picture(model: Flux2KleinModel, num_references: int) -> None:
    """Of another shape, with as many pixels: neither side resizes them."""
    references = tuple(other_picture(seed) for seed in range(num_references))
    edit = make_edit(share=1.0, seed=7, guidance=1.0, references=references)
    [latents] = run(model, [edit])
    assert len(prepare(edit, model).reference) == (1 + num_references) * 12 * 8
    stock = stock_latents(model, edit, image_reference=[Image.fromarray(one) for one in references])
    assert apart(latents, stock) <= close(model)
    assert apart(latents, stock_latents(model, edit)) > far(model)


def test_law_1_without_a_mask_is_the_pipeline_that_knows_none(model: Flux2KleinModel) -> None:
    references = other_picture(5, (96, 64)), other_picture(6, (64, 96))
    edit = make_edit(size=(64, 96), share=1.0, seed=7, guidance=2.0, references=references)
    [latents] = run(model, [edit])
    stock = stock_without_mask(model, edit, [edit.picture, *edit.references])
    assert apart(latents, stock) <= close(model)
    assert apart(latents, stock_without_mask(model, edit, [edit.picture, *edit.references[::-1]])) > far(model)


@pytest.mark.parametrize("references", [(), (other_picture(5, (96, 64)),)])
def test_law_1_a_picture_from_nothing_shows_the_references_alone(
    model: Flux2KleinModel, references: tuple[Pixels, ...]
) -> None:
    edit = make_edit(size=(64, 96), share=1.0, seed=7, guidance=1.0, from_nothing=True, references=references)
    job = prepare(edit, model)
    assert (job.reference is None) == (not references)
    assert can_reuse(job) == bool(references)
    assert apart(*run(model, [job]), stock_without_mask(model, edit, list(references))) <= close(model)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_law_1_partial_mask_is_a_plain_loop(model: Flux2KleinModel, guidance: float, strength: float) -> None:
    edit = make_edit(steps=5, seed=7, guidance=guidance, negative_prompt="nothing blue", strength=strength)
    [latents] = run(model, [edit])
    assert apart(latents, plain_loop(model, edit)) <= close(model)
    assert apart(latents, plain_loop(model, replace(edit, seed=8))) > far(model)
    assert apart(latents, plain_loop(model, replace(edit, mask=edit.mask[::-1].copy()))) > far(model)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_without_a_mask_picture_and_reference_are_read(model: Flux2KleinModel, kind: Kind) -> None:
    edit = make_edit(prompt="", share=1.0, guidance=1.0, references=(other_picture(),))
    job = prepare(edit, model)
    job = replace(job, step=1, latents=job.template.at(1, job.schedule))
    activations = register_for(model, edit, kind, references=edit.references)
    assert activations.rows[0].shape[3] == 3 * len(job.masked)
    dense = predict(model, job)
    for plan in feasible(kind, model.run_lengths):
        cached = reuse(job, activations, plan)
        assert len(cached.rest) == len(cached.reference) == 2 * len(job.masked)
        assert apart(predict(model, cached)[0], dense[0]) <= close(model), plan
    rolled = replace(activations, rows=tuple(rows.roll(1, dims=3) for rows in activations.rows))
    assert apart(predict(model, reuse(job, rolled))[0], dense[0]) > far(model, 10)


def test_more_references_than_the_model_takes(model: Flux2KleinModel) -> None:
    with pytest.raises(EditError, match="4 pictures beside the edited one: this model takes at most 3"):
        prepare(make_edit(references=tuple(map(other_picture, range(4)))), model)


@torch.no_grad()
def test_ragged_is_diffusers_in_bfloat16(model: Flux2KleinModel) -> None:
    """A batch of jobs of several sizes and prompts, against one call of diffusers' transformer for each."""
    low = replace(model, transformer=copy.deepcopy(model.transformer).bfloat16(), dtype=torch.bfloat16)
    jobs = [prepare(edit, model) for edit in mixed_edits()[1:3]]
    for job in jobs:
        job.branches = tuple(
            replace(branch, text=branch.text.bfloat16(), pooled=branch.pooled.bfloat16()) for branch in job.branches
        )
    low.transformer.context_embedder = torch.nn.Identity()  # the text of a branch is embedded
    pipeline = quiet_pipeline(model)
    for job, found in zip(jobs, low.predict(jobs), strict=True):
        grid = torch.zeros(1, 1, *job.grid)
        positions = torch.cat([pipeline._prepare_latent_ids(grid), pipeline._prepare_image_ids([grid], 1)], dim=1)
        for branch, one in zip(job.branches, found, strict=True):
            stock = low.transformer(
                hidden_states=torch.cat([job.latents, job.reference])[None].bfloat16(),
                timestep=job.timestep[None],
                encoder_hidden_states=branch.text[None],
                txt_ids=pipeline._prepare_text_ids(branch.text[None]).to(model.device),
                img_ids=positions.to(model.device),
            ).sample
            truth = stock[0, : len(job.masked)]
            assert one.dtype == torch.bfloat16
            assert apart(one[: len(truth)], truth) / truth.abs().max() < 0.05


@pytest.mark.parametrize("num_tokens", [96, 4096, 4300, 4301, 16384])
def test_the_shift_is_that_of_the_stock_pipelines(num_tokens: int) -> None:
    for steps in (1, 4, 10, 50, 200):
        assert find_shift(num_tokens, steps) == pytest.approx(compute_empirical_mu(num_tokens, steps), rel=1e-6)


def test_shared_modulation_is_computed_once(model: Flux2KleinModel) -> None:
    network = model.joint_network
    assert len(network.modulation_layers) == len(network.first_columns) == 4
    num_columns = sum(layer.out_features for layer in network.modulation_layers)
    assert model.modulation.at([prepare(make_edit(guidance=1.0), model)]).shape == (1, num_columns)


def test_facts(model: Flux2KleinModel, distilled: Flux2DistilledModel) -> None:
    assert (model.patch, model.latent_channels, model.num_text_tokens) == (4, 4, 9)
    assert (model.own_size, model.steps, model.guidance, model.whole_strength) == (1024, 50, 4.0, 1.0)
    assert (model.needs_true_guidance, distilled.needs_true_guidance) == (False, True)
    assert model.digest != replace(model, vae=with_other_statistics(model)).digest


def with_other_statistics(model: Flux2KleinModel) -> torch.nn.Module:
    vae = copy.deepcopy(model.vae)
    vae.bn.running_mean += 1
    return vae


def test_a_distilled_model_says_so(where: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    klein(is_distilled=True).save_pretrained(tmp_path)
    model = load(str(tmp_path), where.device, where.dtype)
    assert isinstance(model, Flux2DistilledModel)
    assert (model.steps, model.guidance) == (4, 1.0)


def test_padding_follows_the_prompt_or_is_not_known(model: Flux2KleinModel) -> None:
    """The prompt has two words around it. Where padding comes first, no token is known to be padding."""
    left = copy.deepcopy(model.tokenizer)
    left.padding_side = "left"
    counts = [one.branch("a red cat", (2, 2)).num_prompt for one in (model, replace(model, tokenizer=left))]
    assert counts == [5, None]


def test_original_names_are_those_of_layers(model: Flux2KleinModel) -> None:
    known = dict(model.transformer.named_modules())
    named = {layer for alias in original_names(model.transformer).values() for layer in alias.layers}
    assert named <= set(known)
    assert named == {name for name, layer in known.items() if isinstance(layer, torch.nn.Linear)}


@pytest.mark.parametrize(
    ("part", "config", "says"),
    [
        ("transformer", {"in_channels": 20}, "has 20 channels: 16, those of a patch of latents, are expected"),
        ("transformer", {"patch_size": 2}, r"patches of \(2, 2\) latents and of 2 tokens: \(2, 2\) and 1 are expected"),
        ("text_encoder", {"hidden_size": 20}, "three of them have 60 channels: at least 27 layers and 48 channels"),
        ("text_encoder", {"num_hidden_layers": 12}, "has 12 layers.*at least 27 layers and 48 channels"),
        ("scheduler", {"invert_sigmas": True}, "invert_sigmas on: both must be off"),
    ],
)
def test_what_the_pass_does_not_compute_is_refused(
    part: str, config: dict[str, Any], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Only the configs are read: the parts have no weights."""
    folder = shutil.copytree(folders["klein"], tmp_path / "model")
    path = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    known = json.loads(path.read_text()) | config
    if "num_hidden_layers" in config:
        known["layer_types"] = known["layer_types"][: config["num_hidden_layers"]]
    path.write_text(json.dumps(known))
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu", weights=frozenset())

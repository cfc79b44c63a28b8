"""FLUX.1 Kontext: a picture, or another in its place, is a second set of image tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from helpers.cached import KINDS, feasible, predict, register_for
from helpers.edits import apart, close, far, make_edit, quiet_pipeline, run, stock_arguments
from PIL import Image
from torch import Tensor

from instgenie.cost.network import Demand
from instgenie.editor import Editor, make_store
from instgenie.engine.demand import make_demand
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import draw_noise, prepare
from instgenie.engine.pricing import job_shape
from instgenie.engine.register import can_reuse, make_key, reuse
from instgenie.errors import EditError
from instgenie.jobs.activations import Kind, parse_key
from instgenie.jobs.job import Job
from instgenie.models.flux.model import FluxKontextModel
from instgenie.models.model import Model, unpack_latents
from instgenie.types import Edit, Pixels
from instgenie.workers.frames import job_frames, read_job


@pytest.fixture
def model(models: dict[str, Model]) -> FluxKontextModel:
    return models["kontext"]


def other_picture(seed: int = 5, size: tuple[int, int] = (48, 32)) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def stock_latents(model: FluxKontextModel, edit: Edit, **options: object) -> Tensor:
    height, width = edit.picture.shape[:2]
    grid = height // model.patch, width // model.patch
    noise = unpack_latents(draw_noise(edit.seed, grid, model).to(model.dtype), grid)
    given = stock_arguments(edit) | model.stock_arguments | options
    latents: Tensor = quiet_pipeline(model)(**given, latents=noise).images[0]
    return latents.float()


def test_law_1_another_picture_in_its_place_is_the_stock_pipelines_reference(model: FluxKontextModel) -> None:
    """Of another shape, with as many pixels: neither side resizes it."""
    reference = other_picture()
    edit = make_edit(share=1.0, seed=7, references=(reference,))
    [latents] = run(model, [edit])
    assert len(prepare(edit, model).reference) == 12 * 8
    assert apart(latents, stock_latents(model, edit, image_reference=Image.fromarray(reference))) <= close(model)
    assert apart(latents, stock_latents(model, edit)) > far(model)


def test_law_1_a_picture_from_nothing_is_the_stock_pipelines_without_a_picture(model: FluxKontextModel) -> None:
    edit = make_edit(share=1.0, seed=7, from_nothing=True)
    job = prepare(edit, model)
    assert job.reference is None
    assert not can_reuse(job)
    [latents] = run(model, [job])
    parts = quiet_pipeline(model).components
    pipeline = FluxKontextPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 48, "max_area": 32 * 48, "max_sequence_length": model.num_text_tokens}
    noise = draw_noise(7, (8, 12), model).to(model.dtype)[None]
    given = {"num_inference_steps": 4, "guidance_scale": edit.guidance, "output_type": "latent"}
    stock = pipeline(prompt=edit.prompt, latents=noise, **size, **given).images[0].float()
    assert apart(latents, stock) <= close(model)


@torch.no_grad()
@pytest.mark.parametrize("references", [(), (other_picture(),)])
@pytest.mark.parametrize("kind", KINDS)
def test_law_3_without_a_mask_the_reference_alone_is_read(
    model: FluxKontextModel, kind: Kind, references: tuple[Pixels, ...]
) -> None:
    edit = make_edit(prompt="", share=1.0, references=references)
    job = prepare(edit, model)
    job = replace(job, step=1, latents=job.template.at(1, job.schedule))
    activations = register_for(model, edit, kind, references=references)
    assert activations.rows[0].shape[3] == 2 * len(job.masked)
    dense = predict(model, job)
    for plan in feasible(kind, model.run_lengths):
        cached = reuse(job, activations, plan)
        assert len(cached.rest) == len(cached.reference) == len(job.masked)
        assert apart(predict(model, cached)[0], dense[0]) <= close(model), plan
    rolled = replace(activations, rows=tuple(rows.roll(1, dims=3) for rows in activations.rows))
    assert apart(predict(model, reuse(job, rolled))[0], dense[0]) > far(model, 10)


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_law_own_rows_of_the_reference_are_those_of_the_dense_step(
    model: FluxKontextModel, kind: Kind, share: float
) -> None:
    engine = Engine(model)
    engine.own = OwnActivations(model, kind)
    engine.join(job := reuse_own(prepare(make_edit(share=share, own_steps=(0,)), model)))
    start = job.latents
    engine.step()
    assert job.own_steps is not None
    later = replace(job.own_steps, steps=(job.num_steps - 1,))
    again = replace(job, step=0, latents=start, own_steps=later, kept_step=0)
    dense = replace(again, activations=None, plan=(), own_steps=None)
    with torch.no_grad():
        assert max(map(apart, predict(model, again), predict(model, dense))) <= close(model)


def test_references_are_part_of_the_key(model: FluxKontextModel) -> None:
    plain, other = make_edit(), make_edit(references=(other_picture(),))
    keys = [make_key(edit, model, "kv") for edit in (plain, other, make_edit(references=(other_picture(6),)))]
    assert len(set(keys)) == 3
    assert "references" not in keys[0].text  # files of pictures alone are read as before
    assert [parse_key(key.text) for key in keys] == keys


def test_the_editor_finds_a_template_by_its_references(model: FluxKontextModel) -> None:
    editor = Editor.__new__(Editor)  # with a model that is loaded already
    editor.model, editor.store = model, make_store(model.device)
    edit = make_edit(steps=2, references=(other_picture(),))
    editor.register(edit.picture, edit.size, 2, edit.guidance, references=edit.references)
    found = editor.edit_many([edit, replace(edit, references=()), replace(edit, mask=np.ones_like(edit.mask))])
    assert [result.cache_hit for result in found] == [True, False, True]


def test_an_edit_from_nothing_reads_no_template(model: FluxKontextModel) -> None:
    """Templates have rows of the picture that the model saw, and this edit has none."""
    editor = Editor.__new__(Editor)
    editor.model, editor.store = model, make_store(model.device)
    edit = make_edit(steps=2)
    editor.register(edit.picture, edit.size, 2, edit.guidance)
    found = editor.edit_many([edit, replace(edit, from_nothing=True)])
    assert [result.cache_hit for result in found] == [True, False]


def test_more_references_than_a_model_takes(models: dict[str, Model]) -> None:
    references = (other_picture(), other_picture(6))
    with pytest.raises(EditError, match="2 pictures beside the edited one: this model takes at most 1"):
        prepare(make_edit(references=references), models["kontext"])
    for name in ("blend", "sd3", "sd"):
        with pytest.raises(EditError, match="1 picture beside the edited one: this model takes none"):
            prepare(make_edit(references=references[:1]), models[name])


def test_a_job_travels_with_its_reference(model: FluxKontextModel) -> None:
    for edit in (make_edit(), make_edit(references=(other_picture(),))):
        job = prepare(edit, model)
        read = read_job(*job_frames(job), model.device)
        assert read.reference is not None
        assert torch.equal(read.reference, job.reference)
        assert torch.equal(*run(model, [read]), *run(model, [job]))


def test_prices_count_the_reference(model: FluxKontextModel) -> None:
    job = prepare(make_edit(), model)
    demand = make_demand(job, model.describe())
    assert demand.num_tokens == 2 * len(job.masked) == job.num_seen
    assert demand.num_masked == {1: len(job.inside)}
    shape = job_shape(model, 4)
    assert shape.dense_demand(96) == Demand(192, {1: 192}, model.num_text_tokens)
    assert shape.demand(96, 10, in_gpu=True).num_rest(shape.network.blocks[0]) == 182


def test_padded_lists_of_tokens_read_every_reference_token(model: FluxKontextModel) -> None:
    edit = make_edit(share=0.3, steps=2)
    job: Job = reuse(prepare(edit, model), register_for(model, edit, "kv"))
    with torch.no_grad():
        packed = model.pack([job], pads=True)
        [[padded]], [[plain]] = packed.deal(model.run(packed)), model.predict([job])
    assert apart(padded, plain) <= close(model)

"""The laws of texts whose padding is read from activations, on the families whose texts have one length and flow with
the image."""

from dataclasses import replace

import pytest
import torch
from helpers.cached import KINDS, feasible, on_trajectory, predict, register_for
from helpers.edits import apart, close, far, make_edit, prepare, run
from helpers.names import PADDED_FAMILIES
from torch import Tensor

from instgenie.cache.disk import DiskTier
from instgenie.cache.store import Store
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.register import make_activations, make_key, register_in, reuse
from instgenie.jobs.activations import Kind, parse_key
from instgenie.jobs.job import Job
from instgenie.jobs.tokens import text_bucket
from instgenie.models.model import Model
from instgenie.types import Edit

SHORT, LONG = "flower", "a red cat on grass a red cat"  # one token, and more than the models take


@pytest.fixture(params=PADDED_FAMILIES)
def flux(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def make_job(model: Model, edit: Edit, kind: Kind, keeps_text: bool = True, **options: object) -> Job:
    return reuse(prepare(edit, model), register_for(model, edit, kind, keeps_text=keeps_text, **options))


def run_own(model: Model, job: Job, kind: Kind, keeps_text: bool, graphs: Graphs | None = None) -> Tensor:
    engine = Engine(model, graphs=graphs)
    engine.own = OwnActivations(model, kind, keeps_text)
    engine.join(job := replace(job))
    while engine.jobs:
        engine.step()
    return job.latents


@pytest.mark.parametrize("kind", KINDS)
def test_law_3_padding_is_what_the_registration_saw(flux: Model, kind: Kind) -> None:
    """With the registration's own prompt every plan gives the dense prediction."""
    edit = make_edit(prompt="", steps=3)
    expected = predict(flux, job := on_trajectory(flux, edit, 1))
    cache = register_for(flux, edit, kind, keeps_text=True)
    assert cache.rows[0].shape[3] == flux.num_flowing_text + job.num_seen
    assert job.num_prompt < flux.num_flowing_text
    for plan in feasible(kind, flux.run_lengths):
        assert max(map(apart, predict(flux, reuse(job, cache, plan)), expected)) <= close(flux), plan


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_fills_the_text_computes_all_of_it(flux: Model, kind: Kind) -> None:
    edit = make_edit(prompt=LONG, true_guidance=2.0, negative_prompt=SHORT)
    [kept], [computed] = (run(flux, [make_job(flux, edit, kind, keeps_text)]) for keeps_text in (True, False))
    assert torch.equal(kept, computed)


def test_law_4_padding_of_kv_is_that_of_y(flux: Model) -> None:
    edit = make_edit(prompt=SHORT, true_guidance=2.0, negative_prompt="a cat")
    kv, y = (run(flux, [make_job(flux, edit, kind, stride=2)])[0] for kind in KINDS)
    assert apart(kv, y) <= close(flux)
    assert apart(kv, run(flux, [make_job(flux, edit, "kv", keeps_text=False, stride=2)])[0]) > far(flux, 1)


def test_law_1_a_full_mask_and_a_dense_edit_compute_all_text(flux: Model) -> None:
    """A full mask leaves a model that sees the picture the tokens of that picture to read, and then it reads padding
    too: that one has the dense edit alone."""
    full, all_dense = make_edit(prompt=SHORT, share=1.0), make_edit(prompt=SHORT, dense_steps=4)
    assert (make_job(flux, full, "kv").num_prompt < flux.num_flowing_text) == flux.sees_picture
    for edit in (all_dense,) if flux.sees_picture else (full, all_dense):
        job = make_job(flux, edit, "kv")
        assert apart(run(flux, [job])[0], run(flux, [prepare(edit, flux)])[0]) <= close(flux)


@pytest.mark.parametrize("kind", KINDS)
def test_law_2_padding_in_a_batch_is_padding_alone(flux: Model, kind: Kind) -> None:
    """Beside jobs that compute their padding, that are dense, and that keep their own rows; captured or not."""
    edits = [
        make_edit(prompt=SHORT, steps=4),
        make_edit(prompt="red cat", steps=3, share=0.2, seed=1, true_guidance=2.0, negative_prompt=SHORT),
        make_edit(prompt=SHORT, steps=4, share=0.3, picture_seed=1, dense_steps=1),
    ]
    jobs = [make_job(flux, edit, kind) for edit in edits]
    jobs += [make_job(flux, edits[0], kind, keeps_text=False), prepare(edits[1], flux)]
    alone = [run(flux, [job])[0] for job in jobs]
    assert max(map(apart, run(flux, jobs), alone)) <= close(flux)
    graphs = Graphs(flux, max_readers=99)
    for _ in range(2):
        engine, captured = Engine(flux, graphs=graphs), [replace(job) for job in jobs]
        for job in captured:
            engine.join(job)
        while engine.jobs:
            engine.step()
        assert max(apart(job.latents, latents) for job, latents in zip(captured, alone, strict=True)) <= close(flux)
    assert graphs.captured


@pytest.mark.parametrize("kind", KINDS)
def test_law_own_padding_is_that_of_the_dense_step(flux: Model, kind: Kind) -> None:
    """At the step that left them, rows of text and image give the same prediction as computing every token."""
    engine = Engine(flux)
    engine.own = OwnActivations(flux, kind, keeps_text=True)
    engine.join(job := reuse_own(prepare(make_edit(prompt=SHORT, true_guidance=2.0, own_steps=(0,)), flux)))
    start = job.latents
    engine.step()
    assert job.activations is not None
    assert job.own_steps is not None
    later = replace(job.own_steps, steps=(job.num_steps - 1,))
    again = replace(job, step=0, latents=start, own_steps=later, kept_step=0)
    dense = replace(again, activations=None, plan=(), own_steps=None)
    with torch.no_grad():
        expected, found = predict(flux, dense), predict(flux, again)
    assert max(map(apart, found, expected)) <= close(flux)


@pytest.mark.parametrize("kind", KINDS)
def test_law_own_padding_captured_is_uncaptured(flux: Model, kind: Kind) -> None:
    job = reuse_own(prepare(make_edit(prompt=SHORT, steps=6, own_steps=(0, 3)), flux))
    read = run_own(flux, job, kind, keeps_text=True)
    assert apart(read, run_own(flux, job, kind, keeps_text=True, graphs=Graphs(flux))) <= close(flux)
    assert apart(read, run_own(flux, job, kind, keeps_text=False)) > 0
    full = replace(job, branches=tuple(replace(branch, num_prompt=None) for branch in job.branches))
    assert torch.equal(run_own(flux, full, kind, keeps_text=True), run_own(flux, job, kind, keeps_text=False))


@pytest.mark.parametrize("cache_dtype", ["model", "int4"])
def test_padding_is_stored_and_loaded_with_the_template(models: dict[str, Model], tmp_path, cache_dtype) -> None:
    model, edit = models["blend_guided"], make_edit(prompt=SHORT, steps=4)
    store = Store(disk=DiskTier(tmp_path, 2**30))
    options = {"cache_dtype": cache_dtype, "stride": 2, "keeps_text": True}
    register_in(store, edit.picture, model, edit.size, 4, edit.guidance, **options)
    store.settle()
    key = make_key(edit, model, "kv", cache_dtype, 2, keeps_text=True)
    found = store.get(key, torch.device("cpu"))
    assert found is not None
    loaded = reuse(prepare(edit, model), make_activations(key, found.span, model))
    assert torch.equal(run(model, [loaded])[0], run(model, [make_job(model, edit, "kv", **options)])[0])
    assert parse_key(key.text) == key
    without = make_key(edit, model, "kv", cache_dtype, 2)
    assert "num_text" not in without.text  # files without rows of text are read as before
    assert store.get(without, torch.device("cpu")) is None
    store.close()


@pytest.mark.parametrize("family", ["sd", "zimage"])
def test_text_that_does_not_flow_or_has_no_more_tokens_than_it_needs_is_not_kept(
    models: dict[str, Model], family: str
) -> None:
    edit = make_edit(prompt=SHORT)
    assert make_key(edit, models[family], "kv", keeps_text=True) == make_key(edit, models[family], "kv")


def test_prompts_of_about_one_length_compute_as_many_tokens() -> None:
    assert [text_bucket(count, 512) for count in (1, 20, 32, 33, 70, 200, 400)] == [32, 32, 32, 64, 128, 256, 512]
    assert [text_bucket(count, 64) for count in (0, 4, 5, 12, 33)] == [4, 4, 8, 16, 64]

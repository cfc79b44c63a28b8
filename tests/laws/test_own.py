"""The laws of own reuse, on every family: an edit reads what its own dense steps left behind."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.cached import KINDS, make_cached
from helpers.edits import CLOSE, apart, close, far, make_edit, prepare, run

from instgenie.engine.finish import finish
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, can_reuse_own, reuse_own
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit


def make_own(model: Model, edit: Edit) -> Job:
    return reuse_own(prepare(edit, model))


def make_engine(model: Model, kind: Kind) -> Engine:
    engine = Engine(model)
    engine.own = OwnActivations(model, kind)
    return engine


def run_kind(model: Model, kind: Kind, job: Job) -> torch.Tensor:
    engine = make_engine(model, kind)
    engine.join(job := replace(job))
    while engine.jobs:
        engine.step()
    return job.latents


@pytest.mark.parametrize("kind", KINDS)
def test_law_own_dense_at_every_step_is_dense(model: Model, kind: Kind) -> None:
    edit = make_edit(true_guidance=2.0, own_steps=(0, 1, 2, 3))
    [dense] = run(model, [prepare(edit, model)])
    assert torch.equal(run_kind(model, kind, make_own(model, edit)), dense)
    kept_in_vain = replace(edit, own_steps=(0, 2, 3))  # the first step's rows serve the second
    assert apart(run_kind(model, kind, make_own(model, kept_in_vain)), dense) > 0


@pytest.mark.parametrize("true_guidance", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_law_own_rows_are_those_of_the_dense_step(model: Model, kind: Kind, true_guidance: float) -> None:
    """At the step that left them, rows give the same prediction as computing every token."""
    engine = make_engine(model, kind)
    engine.join(job := make_own(model, make_edit(true_guidance=true_guidance, own_steps=(0,))))
    start = job.latents
    engine.step()
    assert job.kept_step == 0
    again = replace(job, step=0, latents=start)
    dense = replace(again, activations=None, plan=(), own_steps=None)
    with torch.no_grad():
        expected, found = model.predict([dense])[0], model.predict([with_rows_of(again, step=0)])[0]
    for whole, own in zip(expected, found, strict=True):
        inside = own if len(own) == len(job.inside) else own[job.inside]
        assert apart(whole[job.inside], inside) <= close(model)


def with_rows_of(job: Job, step: int) -> Job:
    """The job at a step that is dense by its schedule, as if it were not."""
    later = replace(job.own_steps, steps=(job.num_steps - 1,)) if job.own_steps else None
    return replace(job, step=step, own_steps=later, kept_step=step)


def test_law_own_kv_is_y(model: Model) -> None:
    job = make_own(model, make_edit(steps=5, true_guidance=2.5, negative_prompt="sky", own_steps=(0, 2)))
    kv, y = (run_kind(model, kind, job) for kind in KINDS)
    assert apart(kv, y) <= close(model)
    assert apart(kv, run(model, [prepare(job.edit, model)])[0]) > far(model, 1)


def test_law_own_batched_is_alone(model: Model) -> None:
    """In one pass with registered, dense and other own jobs, whatever the others' steps."""
    edits = [
        make_edit(steps=5, share=0.2, own_steps=(0, 2)),
        make_edit(steps=4, share=0.5, seed=2, own_steps=(0, 1), true_guidance=2.0, prompt="a blue dog on grass"),
        make_edit(steps=6, share=0.3, picture_seed=1, own_steps=(0, 2), max_change=0.2),
    ]
    jobs = [make_own(model, edit) for edit in edits]
    jobs += [make_cached(model, make_edit(steps=4, seed=3), "kv"), prepare(make_edit(steps=3, seed=4), model)]
    together, alone = run(model, jobs), [run(model, [job])[0] for job in jobs]
    assert max(map(apart, together, alone)) <= close(model)


def test_law_own_outside_the_mask_is_bit_identical(model: Model) -> None:
    edit = make_edit(steps=3, feather=2, own_steps=(0,))
    job = make_own(model, edit)
    [latents] = run(model, [job])
    assert torch.equal(latents[~job.masked[:, 0]], job.template.clean[~job.masked[:, 0]])
    picture = finish(replace(job, latents=latents), model)
    assert np.array_equal(picture[~edit.mask], edit.picture[~edit.mask])


def test_law_own_full_mask_is_exact(model: Model) -> None:
    """From nothing: otherwise a model that sees the picture has the tokens of that picture to read. They attend to the
    edit's, which change from step to step, so reading them is no longer exact."""
    edit = make_edit(share=1.0, own_steps=(0,), from_nothing=True)
    assert not can_reuse_own(prepare(edit, model))
    [dense] = run(model, [prepare(edit, model)])
    assert apart(run(model, [make_own(model, edit)])[0], dense) <= CLOSE


def test_a_job_keeps_one_copy_and_writes_over_it(model: Model) -> None:
    engine = Engine(model)
    engine.join(job := make_own(model, make_edit(steps=6, own_steps=(0, 1, 4), true_guidance=2.0)))
    kept, addresses = [], set()
    while engine.jobs:
        kept.append(job.keeps_activations)
        engine.step()
        if job.activations:
            addresses.add(job.activations.rows[0].data_ptr())
    assert kept == [False, True, False, False, True, False]  # after step 0 another dense step follows
    assert len(addresses) == 1
    assert job.activations
    assert job.activations.rows[0].shape[:2] == (len(job.branches), 1)
    share_cached = 3 / 6
    assert job.num_computed_tokens == round(len(job.masked) - share_cached * len(job.outside))


def test_a_job_that_starts_again_makes_its_activations_again(model: Model) -> None:
    """On another worker a job begins anew with nothing but its latents; rows of a step before are not read."""
    job = make_own(model, make_edit(steps=5, own_steps=(0, 3)))
    resumed = replace(job, step=1)
    assert resumed.in_dense_steps
    assert resumed.keeps_activations
    assert run(model, [resumed])[0].isfinite().all()


def test_dense_steps_are_found_from_how_fast_activations_change(model: Model) -> None:
    """A smaller tolerance takes more dense steps, and a vast one no more than the two that are needed to measure."""
    engine = Engine(model)
    jobs = [make_own(model, make_edit(steps=12, own_steps=(0, 2), max_change=change)) for change in (1e-6, 1e9)]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    assert [job.own_steps.steps for job in jobs if job.own_steps] == [(0, 2, 4, 6, 8, 10), (0, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_law_own_captured_is_uncaptured(model: Model, kind: Kind) -> None:
    """Captured passes keep and read rows through a table of addresses; on a CPU the same passes run uncaptured."""
    jobs = [make_own(model, make_edit(steps=5, seed=seed, true_guidance=2.0, own_steps=(0, 3))) for seed in (1, 2)]
    engine = Engine(model, graphs=Graphs(model))
    engine.own = OwnActivations(model, kind)
    captured = [replace(job) for job in jobs]
    for job in captured:
        engine.join(job)
    while engine.jobs:
        engine.step()
    for job, own in zip(jobs, captured, strict=True):
        assert apart(own.latents, run_kind(model, kind, job)) <= close(model)

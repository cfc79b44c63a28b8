"""Competing methods on a tiny Flux: each must agree with the plain engine where both compute the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.edits import make_edit
from torch import Tensor

from instgenie.bench.baselines import (
    StepSkipping,
    count_computed,
    crop,
    drop_unmasked,
    find_threshold,
    put_back,
    side_of_cost,
)
from instgenie.bench.cost import square_flops
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Job
from instgenie.models.flux.model import FluxModel
from instgenie.models.model import Model


@pytest.fixture(params=["blend", "fill"])
def flux(request: pytest.FixtureRequest, models: dict[str, Model]) -> FluxModel:
    model = models[request.param]
    assert isinstance(model, FluxModel)
    return model


def denoised(model: Model, job: Job) -> Job:
    own = replace(job)
    engine = Engine(model)
    engine.join(own)
    while engine.jobs:
        engine.step()
    return own


def apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@torch.no_grad()
def test_dropping_nothing_is_dense_and_dropping_something_is_not(flux: FluxModel) -> None:
    full, part = (prepare(make_edit(share=share), flux) for share in (1.0, 0.3))
    for job, same in ((full, True), (part, False)):
        dropped = denoised(flux, drop_unmasked(job))
        ended = put_back(dropped, job)
        assert len(dropped.latents) == len(job.inside)
        assert (apart(ended.latents, denoised(flux, job).latents) < 1e-4) is same
        assert torch.equal(ended.latents[job.outside], job.template.clean[job.outside])
        assert ended.done


def test_a_crop_holds_the_mask_and_is_stitched_where_it_was(flux: FluxModel) -> None:
    edit = make_edit(size=(96, 128), share=0.1, steps=1)
    own = replace(flux, own_size=128)
    part = crop(edit, 16, 64, own)
    height, width = part.edit.mask.shape
    assert part.edit.mask.sum() == edit.mask.sum()
    assert height == width < 96
    assert part.edit.size == (64, 64)
    stitched = part.stitch(finish(denoised(own, prepare(part.edit, own)), own))
    assert np.array_equal(stitched[~edit.mask], edit.picture[~edit.mask])
    assert (stitched[edit.mask] != edit.picture[edit.mask]).any()
    whole = crop(edit, 128, 128, own)
    assert whole.edit.picture.shape == edit.picture.shape


def test_the_side_of_a_cost_costs_no_more(flux: FluxModel) -> None:
    own = replace(flux, own_size=256)
    whole = square_flops(own, 256, 5)
    for share in (0.1, 0.5):
        side = side_of_cost(own, 5, share)
        assert square_flops(own, side, 5) <= share * whole < square_flops(own, side + own.size_multiple, 5)
    assert side_of_cost(own, 5, 1.0) == 256
    assert side_of_cost(own, 5, 0.0) == 2 * own.size_multiple


def test_skipping_nothing_is_dense(flux: FluxModel) -> None:
    jobs = [prepare(make_edit(prompt, seed=seed), flux) for seed, prompt in enumerate(("a red cat", "sky"))]
    own = [replace(job) for job in jobs]
    tracks = StepSkipping(flux.joint_network, threshold=0.0).run(own)
    assert [track.num_computed for track in tracks] == [4, 4]
    for job, skipped in zip(jobs, own, strict=True):
        assert apart(skipped.latents, denoised(flux, job).latents) < 1e-4


def test_first_and_last_step_are_always_computed(flux: FluxModel) -> None:
    job = prepare(make_edit(steps=6), flux)
    own = replace(job)
    [track] = StepSkipping(flux.joint_network, threshold=1e9).run([own])
    assert track.num_computed == 2
    assert own.done
    assert apart(own.latents, denoised(flux, job).latents) > 1e-3


def test_a_threshold_is_found_for_a_number_of_steps(flux: FluxModel) -> None:
    job = prepare(make_edit(steps=8), flux)
    [track] = StepSkipping(flux.joint_network, threshold=0.0).run([replace(job)])
    assert len(track.changes) == 8
    for num_computed in (3, 5, 8):
        threshold = find_threshold([track.changes], num_computed)
        found = count_computed(track.changes, threshold)
        assert 2 <= found <= num_computed
        [again] = StepSkipping(flux.joint_network, threshold).run([replace(job)])
        assert abs(again.num_computed - found) <= 2  # it changes otherwise where steps are skipped
    assert count_computed([1.0] * 9, 2.0) == 2 + 3

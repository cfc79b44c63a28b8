"""Counted operations of whole edits; what one step counts is tested with the network's shape."""

from dataclasses import replace

import pytest
from helpers.edits import make_edit

from instgenie.bench.cost import job_flops, square_flops
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.models.model import Model


@pytest.mark.parametrize("family", ["builtin", "sdxl"])
def test_an_edit_costs_its_dense_and_its_cached_steps(models: dict[str, Model], family: str) -> None:
    model = models[family]
    edit = make_edit(size=(128, 128), share=0.1, steps=4, dense_steps=1)
    job = prepare(edit, model)
    cached = reuse(job, register(edit.picture, model, edit.size, 4, edit.guidance))
    dense_step = job_flops(model, job) / 4
    cached_step = (job_flops(model, cached) - dense_step) / 3
    assert 0 < cached_step < dense_step
    all_cached = replace(cached, edit=replace(edit, dense_steps=0))
    assert job_flops(model, all_cached) == pytest.approx(4 * cached_step)
    wider = replace(cached, edit=replace(edit, halo=1))
    assert job_flops(model, cached) < job_flops(model, wider) < 4 * dense_step


def test_a_square_costs_what_its_dense_step_costs(models: dict[str, Model]) -> None:
    model = models["builtin"]
    job = prepare(make_edit(size=(128, 128), share=0.3, steps=2), model)
    assert square_flops(model, 128, len(job.branches[0].text)) == job_flops(model, job) / 2

"""Counted operations against those that really run."""

from dataclasses import replace

import pytest
import torch
from conftest import make_edit
from torch.utils.flop_counter import FlopCounterMode

from instgenie.activations import Kind
from instgenie.batch import Job, pack
from instgenie.bench.cost import job_flops, step_flops
from instgenie.engine.prepare import prepare
from instgenie.engine.register import register, reuse
from instgenie.models.flux import embed_time, flow
from instgenie.models.flux_model import FluxModel
from instgenie.models.model import Model


@pytest.fixture
def flux(models: dict[str, Model]) -> FluxModel:
    model = models["builtin"]
    assert isinstance(model, FluxModel)
    return model


@torch.inference_mode()
def counted(model: FluxModel, job: Job) -> int:
    """Products of the blocks in one step; inputs that flow are embedded before counting."""
    transformer, batch = model.transformer, pack([job])
    image, time = transformer.x_embedder(batch.image), embed_time(transformer, batch)
    with FlopCounterMode(display=False) as counter:
        flow(transformer, batch, image, time)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["kv", "y"])
def test_what_is_counted_is_what_runs(flux: FluxModel, kind: Kind) -> None:
    edit = make_edit(size=(128, 128), share=0.3, steps=2)
    job = prepare(edit, flux)
    activations = register(edit.picture, flux, edit.size, 2, edit.guidance, kind)
    plan = (False, *(True for _ in range(activations.num_blocks - 1)))
    for chosen in (job, reuse(job, activations), reuse(job, activations, plan)):
        assert counted(flux, chosen) == pytest.approx(step_flops(flux.transformer, chosen, chosen.plan), rel=0.05)


def test_an_edit_costs_its_dense_and_its_cached_steps(flux: FluxModel) -> None:
    edit = make_edit(size=(128, 128), share=0.1, steps=4, dense_steps=1)
    job = prepare(edit, flux)
    cached = reuse(job, register(edit.picture, flux, edit.size, 4, edit.guidance))
    dense_step = job_flops(flux.transformer, job) / 4
    assert dense_step == step_flops(flux.transformer, job, ())
    cached_step = step_flops(flux.transformer, cached, cached.plan)
    assert cached_step < dense_step
    assert job_flops(flux.transformer, cached) == dense_step + 3 * cached_step
    wider = replace(cached, edit=replace(edit, halo=1))
    assert job_flops(flux.transformer, cached) < job_flops(flux.transformer, wider) < 4 * dense_step

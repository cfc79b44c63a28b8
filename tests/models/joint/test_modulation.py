"""Columns that modulate the blocks: computed for many steps at once, read step by step, and gone with their job."""

import gc
from collections.abc import Sequence

import pytest
import torch
from helpers.edits import make_edit
from helpers.names import JOINT_FAMILIES
from torch import Tensor, nn

from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Job
from instgenie.models.flux.model import FluxModel
from instgenie.models.joint import modulation
from instgenie.models.joint.batch import pack
from instgenie.models.joint.model import JointModel
from instgenie.models.joint.modulation import Modulation, ModulationTables
from instgenie.models.joint.network import velocity
from instgenie.models.layers.linear import Owners, linear
from instgenie.models.model import Model


@pytest.fixture
def flux(models: dict[str, Model]) -> FluxModel:
    model = models["blend_guided"]
    assert isinstance(model, FluxModel)
    return model


def make_jobs(model: FluxModel) -> list[Job]:
    """Of one branch and of two, with different numbers of steps, guidances and prompts."""
    edits = [
        make_edit(size=(32, 32), steps=3, guidance=2.0),
        make_edit(size=(32, 32), steps=40, guidance=5.0, true_guidance=2.0, prompt="a dog"),
    ]
    return [prepare(edit, model) for edit in edits]


@pytest.mark.parametrize("family", [*JOINT_FAMILIES, "qwen"])
def test_a_block_names_the_modulation_of_all_its_entries(models: dict[str, Model], family: str) -> None:
    model = models[family]
    assert isinstance(model, JointModel)
    for block in model.joint_network.blocks:
        entries = [*block.entries(is_text=False), *block.entries(is_text=True)]
        assert list(block.modulations) == list(dict.fromkeys(entry.modulation for entry in entries))


@torch.inference_mode()
def test_columns_are_those_that_blocks_would_compute(flux: FluxModel) -> None:
    jobs, tables = make_jobs(flux), ModulationTables(flux.joint_network)
    jobs[0].step, jobs[1].step = 1, 35
    for _ in range(2):
        batch = pack(jobs)
        own = Modulation(flux.joint_network.embed_time(batch))
        read = Modulation(columns=tables.at(jobs), firsts=flux.joint_network.first_columns)
        for layer in flux.joint_network.modulation_layers:
            for found, expected in zip(read.of(layer), own.of(layer), strict=True):
                assert found.shape == (3, layer.in_features)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        jobs[0].step, jobs[1].step = 2, 4  # back, to a step that is not there


@torch.inference_mode()
def test_a_step_is_the_same_with_columns_and_without(flux: FluxModel) -> None:
    jobs = make_jobs(flux)
    found = flux.run(flux.pack(jobs))
    torch.testing.assert_close(found, velocity(flux.joint_network, pack(jobs)), rtol=1e-4, atol=1e-5)


def test_every_layer_is_multiplied_once_in_many_steps(flux: FluxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counting(layer: nn.Module, x: Tensor, owners: Owners | None) -> Tensor:
        rows.append(len(x))
        return linear(layer, x, owners)

    monkeypatch.setattr(modulation, "linear", counting)
    num_layers = len(flux.joint_network.modulation_layers)
    engine = Engine(flux)
    job = prepare(make_edit(size=(32, 32), steps=5), flux)
    engine.join(job)
    while engine.jobs:
        engine.step()
    assert rows == [5] * num_layers
    monkeypatch.setattr(modulation, "MAX_STEPS", 2)
    run_steps(flux, [prepare(make_edit(size=(32, 32), steps=5), flux)])
    assert rows[num_layers:] == [2] * num_layers * 2 + [1] * num_layers


def run_steps(model: FluxModel, jobs: Sequence[Job]) -> None:
    engine = Engine(model)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()


def test_columns_go_with_their_job(flux: FluxModel) -> None:
    tables = ModulationTables(flux.joint_network)
    jobs = make_jobs(flux)
    tables.at(jobs)
    assert len(tables) == 2
    jobs.pop()
    gc.collect()
    assert len(tables) == 1

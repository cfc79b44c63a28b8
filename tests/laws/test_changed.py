"""The laws of reusing tokens that hardly change, on every family whose tokens flow through all blocks."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.edits import apart, close, far, make_edit, run
from helpers.names import JOINT_FAMILIES, SHORT
from torch import Tensor

from instgenie.engine.changed import ChangedTokens
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, can_reuse_own, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import DEFAULT_FILE, read_predictor
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit


@pytest.fixture(params=[*JOINT_FAMILIES, SHORT])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def make_changed(model: Model, edit: Edit) -> Job:
    return reuse_own(prepare(edit, model), changed=True)


def whole(**fields: object) -> Edit:
    return make_edit(**{"share": 1.0, "from_nothing": True, "steps": 7, "reuse": "own"} | fields)  # type: ignore[arg-type]


def make_engine(model: Model, threshold: float, tile: int = 1, graphs: Graphs | None = None) -> Engine:
    predictor = replace(read_predictor(DEFAULT_FILE), tile=tile)
    changed = ChangedTokens(predictor, threshold, model.device)
    return Engine(model, own=OwnActivations(model, changed=changed), graphs=graphs)


def run_changed(engine: Engine, given: list[Job]) -> list[Job]:
    jobs = [replace(job) for job in given]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return jobs


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_law_changed_with_threshold_0_is_dense(model: Model, share: float) -> None:
    """Bit for bit: with a full mask the dense edit, with a mask that of own reuse."""
    edit = whole(share=share, true_guidance=2.0, own_steps=(0, 2))
    expected = reuse_own(prepare(edit, model)) if share < 1 else prepare(edit, model)
    [job] = run_changed(make_engine(model, 0.0), [make_changed(model, edit)])
    assert torch.equal(job.latents, run(model, [expected])[0])


def test_law_changed_batched_is_alone(model: Model) -> None:
    """In one pass with jobs of other sizes, masks and steps, dense and own, as tokens are computed and reused."""
    edits = [
        whole(steps=9),
        whole(steps=8, size=(64, 32), seed=2, true_guidance=2.0, prompt="a blue dog on grass"),
        whole(steps=7, share=0.5, own_steps=(0, 4)),
    ]
    jobs = [make_changed(model, edit) for edit in edits]
    jobs += [reuse_own(prepare(whole(share=0.3, own_steps=(0,)), model)), prepare(whole(steps=4, seed=3), model)]
    threshold = middle_threshold(model)
    together = run_changed(make_engine(model, threshold), jobs)
    alone = [run_changed(make_engine(model, threshold), [job])[0] for job in jobs]
    assert [job.num_computed_tokens for job in together] == [job.num_computed_tokens for job in alone]
    assert max(apart(one.latents, other.latents) for one, other in zip(together, alone, strict=True)) <= close(model)
    assert all(job.num_computed_tokens < len(job.inside) for job in together[:2])



"""Jobs that reuse what hardly changes, whole steps or what blocks choose."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.edits import apart, close, make_edit, prepare
from instgenie.engine.changed import Changed
from instgenie.engine.controls import LocalControls
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations
from instgenie.engine.reuse_predictor import FEATURES, ReusePredictor
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit


class Way(NamedTuple):
    per_block: bool
    tile: int


STEPS = Way(False, 0)


def blocks_of(model: Model) -> Way:
    return Way(True, 3 if model.is_convolutional else 1)


def whole(**fields: Any) -> Edit:
    return make_edit(**{"share": 1.0, "from_nothing": True, "steps": 7, "reuse": "own"} | fields)


def sure(way: Way) -> ReusePredictor:
    """Reuses everything for as long as it may."""
    weights = (0.0,) * len(BLOCK_FEATURES if way.per_block else FEATURES)
    return ReusePredictor(weights, 0.0, tolerance=0.05, max_steps=2, per_block=way.per_block, tile=way.tile)


def run_changed(
    model: Model, given: list[Job], predictor: ReusePredictor, threshold: float, graphs: Graphs | None = None
) -> list[Job]:
    changed = Changed(predictor, threshold, model)
    engine, jobs = Engine(model, own=OwnActivations(model, changed=changed), graphs=graphs), [replace(j) for j in given]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return jobs


def choose_by_blocks(model: Model, patch: pytest.MonkeyPatch) -> Changed:
    """Let blocks choose in the workers of a test, which reuse everything for as long as they may."""
    patch.setattr("instgenie.engine.changed.find_predictor", lambda _: sure(blocks_of(model)))
    return Changed(sure(blocks_of(model)), 0.6, model)


@cache
def lax(model: Model, way: Way) -> ReusePredictor:
    """Reuses, at the threshold 0.5, about the half whose last guesses were better, at most for two steps; of whole
    pictures those that are no worse than one was."""
    engine = Engine(model, own=OwnActivations(model, changed=Changed(sure(way), 1e-6, model)))
    engine.join(job := prepare(whole(steps=5), model))
    while job.step < 4:
        engine.step()
    if way.per_block:
        assert job.blocks
        assert job.blocks.packed
        errors = torch.cat([one.errors for block, one in job.blocks.packed.blocks.items() if isinstance(block, int)])
    else:
        assert job.history
        errors = job.history.errors
    weights = tuple(float(name == "last error") for name in sure(way).features)
    return replace(
        sure(way), weights=weights, bias=-(errors.median() if way.tile else 1.05 * errors.max()).log().item()
    )


def check_equal_inputs(model: Model, job: Job, tile: int | None = None) -> None:
    """Where a block reads what it read before, what it added then is what it would add: a prediction over the same
    latents, of which every block computes some units, is that of a job whose blocks compute all of them."""
    blocks, dense = blocks_of(model) if tile is None else Way(True, tile), replace(job)
    weights = tuple(float(name == "last error") for name in sure(blocks).features)
    Changed(replace(sure(blocks), weights=weights), 0.4, model).welcome(job)
    assert job.blocks
    expected, first = predicted(model, dense), predicted(model, job)
    assert job.blocks.packed
    job.blocks.rule = replace(job.blocks.rule, num_leading=0)
    drawn = torch.Generator().manual_seed(0)
    for number, history in job.blocks.packed.blocks.items():
        errors = torch.rand(len(history.errors), generator=drawn).to(model.device)
        job.blocks.packed.blocks[number] = replace(history, errors=errors)
    again = predicted(model, job)
    assert 0 < job.blocks.share < 1
    assert max(map(apart, first + again, expected + expected)) <= close(model)


def predicted(model: Model, job: Job) -> list[Tensor]:
    with torch.inference_mode():
        LocalControls(model).begin([job])
        return model.predict([job])[0]

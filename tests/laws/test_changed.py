"""The laws of reusing what hardly changes: whole steps on every family; tokens and tiles, which are chosen before each
block, where blocks can."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from helpers.cached import make_cached
from helpers.edits import apart, close, make_edit, prepare, run
from helpers.qwen import several_pictures
from torch import Tensor

from instgenie.engine.changed import Changed
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.reuse_predictor import DEFAULT_FILE, FEATURES, ReusePredictor, read_predictor
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.models.qwen.model import QwenEditModel
from instgenie.types import Edit


class Way(NamedTuple):
    per_block: bool
    tile: int


STEPS = Way(False, 0)


@pytest.fixture(params=["steps", "blocks"])
def way(request: pytest.FixtureRequest, model: Model) -> Way:
    """Tiles of a UNet reach over the edges of its pictures."""
    return STEPS if request.param == "steps" else blocks_of(model)


@pytest.fixture
def blocks(model: Model) -> Way:
    return blocks_of(model)


def blocks_of(model: Model) -> Way:
    return Way(True, 3 if model.is_convolutional else 1)


def whole(**fields: Any) -> Edit:
    return make_edit(**{"share": 1.0, "from_nothing": True, "steps": 7, "reuse": "own"} | fields)


def sure(way: Way) -> ReusePredictor:
    """Reuses everything for as long as it may."""
    weights = (0.0,) * len(BLOCK_FEATURES if way.per_block else FEATURES)
    return ReusePredictor(weights, 0.0, tolerance=0.05, max_steps=2, per_block=way.per_block, tile=way.tile)


def run_changed(
    model: Model, given: list[Job], predictor: ReusePredictor, threshold: float, captured: bool = False
) -> list[Job]:
    changed = Changed(predictor, threshold, model)
    graphs = Graphs(model) if captured else None
    engine, jobs = Engine(model, own=OwnActivations(model, changed=changed), graphs=graphs), [replace(j) for j in given]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return jobs


@cache
def lax(model: Model, way: Way) -> ReusePredictor:
    """Reuses, at the threshold 0.5, about the half whose last guesses were better, at most for two steps; of whole
    pictures those that are no worse than one was."""
    [job] = run_changed(model, [prepare(whole(steps=4), model)], sure(way), 1e-6)
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


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_law_changed_with_threshold_0_is_dense(model: Model, way: Way, share: float) -> None:
    """Bit for bit: with a full mask the dense edit, with a mask that of own reuse."""
    edit = whole(share=share, steps=5, true_guidance=2.0, own_steps=(0, 2))
    job = reuse_own(prepare(edit, model)) if share < 1 else prepare(edit, model)
    [found] = run_changed(model, [job], sure(way), 0.0)
    assert torch.equal(found.latents, run(model, [job])[0])


def test_law_blocks_that_compute_everything_are_dense(model: Model, blocks: Way) -> None:
    """The predictor is asked before each block, and never says reuse."""
    job = prepare(whole(steps=5, true_guidance=2.0), model)
    [found] = run_changed(model, [job], sure(blocks), 1e-6)
    assert found.num_taken_tokens == 5 * len(job.masked)
    assert apart(found.latents, run(model, [job])[0]) <= close(model)


def test_law_changed_batched_is_alone(model: Model, way: Way) -> None:
    """In one batch with jobs of other sizes, masks, steps and guidance, registered, dense and own."""
    edits = [whole(), whole(steps=6, size=(64, 32), seed=2, true_guidance=2.0, prompt="a blue dog on grass")]
    jobs = [prepare(edit, model) for edit in edits]
    jobs += [reuse_own(prepare(whole(steps=6, share=0.5, own_steps=(0, 4)), model))]
    jobs += [make_cached(model, make_edit(steps=5, seed=3), "kv"), prepare(whole(steps=3, seed=4, reuse="off"), model)]
    predictor = lax(model, way)
    together = run_changed(model, jobs, predictor, 0.5)
    alone = [run_changed(model, [job], predictor, 0.5)[0] for job in jobs]
    assert max(apart(one.latents, other.latents) for one, other in zip(together, alone, strict=True)) <= close(model)
    if model.dtype == torch.float32:
        assert [job.num_taken_tokens for job in together] == [job.num_taken_tokens for job in alone]
    assert together[0].num_taken_tokens < 7 * len(jobs[0].masked)


def test_law_changed_captured_is_uncaptured(model: Model, way: Way) -> None:
    jobs = [prepare(whole(seed=seed, true_guidance=2.0), model) for seed in (1, 2)]
    predictor = lax(model, way)
    captured = run_changed(model, jobs, predictor, 0.5, captured=True)
    for one, other in zip(captured, run_changed(model, jobs, predictor, 0.5), strict=True):
        assert apart(one.latents, other.latents) <= close(model)


def test_reuse_is_bounded(model: Model, way: Way) -> None:
    """Everything is computed at the three leading steps and at every third one behind them."""
    [job] = run_changed(model, [prepare(whole(steps=9), model)], sure(way), 0.6)
    assert job.num_taken_tokens == 5 * len(job.masked)  # steps 0, 1, 2, 5 and 8
    assert job.num_computed_tokens == round(5 / 9 * len(job.masked))


def test_law_reuse_of_equal_inputs_is_dense(model: Model, blocks: Way) -> None:
    """Where a block reads what it read before, what it added then is what it would add: a prediction over the same
    latents, of which every block computes some units, is the dense one."""
    check_equal_inputs(model, blocks)


def test_law_reuse_of_equal_inputs_is_dense_with_clean_references(models: dict[str, Model]) -> None:
    model = models["qwen_edit"]
    assert isinstance(model, QwenEditModel)
    check_equal_inputs(clean := several_pictures(model, clean=True), blocks_of(clean))


def check_equal_inputs(model: Model, blocks: Way) -> None:
    job = prepare(whole(steps=5, true_guidance=2.0), model)
    weights = tuple(float(name == "last error") for name in sure(blocks).features)
    Changed(replace(sure(blocks), weights=weights), 0.4, model).welcome(job)
    assert job.blocks
    expected, first = predicted(model, prepare(job.edit, model)), predicted(model, job)
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
        return model.predict([job])[0]


def test_a_repeated_step_judges_no_guess_anew(model: Model, blocks: Way) -> None:
    changed = Changed(sure(blocks), 1e-6, model)
    engine = Engine(model, own=OwnActivations(model, changed=changed))
    engine.join(job := prepare(whole(steps=5), model))
    for _ in range(3):
        engine.step()
    job.step -= 1  # as if something behind the pass had failed
    assert job.blocks
    assert job.blocks.packed
    before = job.blocks.packed.blocks
    with torch.inference_mode():
        model.predict([job])
    for block, history in job.blocks.packed.blocks.items():
        for name in ("errors", "spans", "slopes"):
            assert torch.equal(getattr(history, name), getattr(before[block], name)), (block, name)
    engine.leave(job)
    assert job.blocks.packed is None  # with it the rows of others would stay


def test_caches_go_with_their_jobs(model: Model, blocks: Way) -> None:
    """Jobs that pass together share one structure per block; those that come or go keep their rows, or drop them."""
    changed = Changed(lax(model, blocks), 0.5, model)
    engine = Engine(model, own=OwnActivations(model, changed=changed))
    jobs = [prepare(whole(steps=steps, seed=steps), model) for steps in (4, 6)]
    engine.join(jobs[0])
    engine.step()
    engine.join(jobs[1])
    engine.step()
    memories = [job.blocks for job in jobs]
    assert memories[0]
    assert memories[1]
    assert memories[0].packed is memories[1].packed
    packed = memories[1].packed
    assert packed
    assert all(len(sizes) == 2 for sizes in packed.sizes.values())
    while not jobs[0].done:
        engine.step()
    engine.step()
    left = memories[1].packed
    assert left
    assert left is not packed
    assert all(len(sizes) == 1 for sizes in left.sizes.values())


def test_a_job_with_a_template_guesses_between_its_steps(model: Model) -> None:
    job = make_cached(model, make_edit(steps=9), "kv")
    [reused] = run_changed(model, [job], sure(STEPS), 0.6)
    assert reused.num_taken_tokens == 5 * len(job.inside)
    assert torch.equal(reused.latents[~job.masked[:, 0]], job.template.clean[~job.masked[:, 0]])


def test_the_shipped_predictor_reads_as_it_was_saved(tmp_path: Any) -> None:
    predictor = read_predictor(DEFAULT_FILE)
    predictor.save(tmp_path / "again.json")
    assert read_predictor(tmp_path / "again.json") == predictor
    assert DEFAULT_FILE.read_text() == (tmp_path / "again.json").read_text()

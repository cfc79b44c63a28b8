"""The laws of reusing tokens that hardly change: whole pictures on every family, tiles where tokens flow through all
blocks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.cached import make_cached
from helpers.edits import apart, close, make_edit, run

from instgenie.engine.changed import ChangedTokens
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, can_reuse_changed, reuse_changed, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import DEFAULT_FILE, ReusePredictor, read_predictor
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.types import Edit

SURE = ReusePredictor((0.0,) * 6, bias=0.0, tolerance=0.05, max_steps=2)  # reuses all tokens for as long as it may


@pytest.fixture(params=[0, 1, 2], ids=["whole", "tokens", "tiles"])
def tile(request: pytest.FixtureRequest, model: Model) -> int:
    if request.param and not model.text_flows:
        pytest.skip("a UNet computes all tokens of a step or none")
    return int(request.param)


def whole(**fields: Any) -> Edit:
    return make_edit(**{"share": 1.0, "from_nothing": True, "steps": 7, "reuse": "own"} | fields)


def make_changed(model: Model, edit: Edit, tile: int) -> Job:
    job = prepare(edit, model)
    job = reuse_own(job) if len(job.rest) else job
    assert can_reuse_changed(job, tile > 0)
    reuse_changed(job, tile > 0)
    return job


def run_changed(
    model: Model,
    given: list[Job],
    tile: int,
    threshold: float,
    predictor: ReusePredictor | None = None,
    captured: bool = False,
) -> list[Job]:
    changed = ChangedTokens(replace(predictor or lax(model), tile=tile), threshold, model.device)
    graphs = Graphs(model) if captured else None
    engine, jobs = Engine(model, own=OwnActivations(model, changed=changed), graphs=graphs), [replace(j) for j in given]
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return jobs


@cache
def lax(model: Model) -> ReusePredictor:
    """Reuses, at the threshold 0.5, the half of all tokens whose last guess was better, at most for two steps."""
    [job] = run_changed(model, [make_changed(model, whole(steps=4), 0)], 0, 0.0, SURE)
    assert job.history
    median = job.history.errors.median().log().item()
    return replace(SURE, weights=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0), bias=-median)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_law_changed_with_threshold_0_is_dense(model: Model, tile: int, share: float) -> None:
    """Bit for bit: with a full mask the dense edit, with a mask that of own reuse."""
    edit = whole(share=share, steps=5, true_guidance=2.0, own_steps=(0, 2))
    expected = reuse_own(prepare(edit, model)) if share < 1 else prepare(edit, model)
    if share < 1 and tile:
        pytest.skip("the rows of masked tokens are kept at every step, which own reuse does not do")
    [job] = run_changed(model, [make_changed(model, edit, tile)], tile, 0.0)
    assert torch.equal(job.latents, run(model, [expected])[0])


def test_law_changed_batched_is_alone(model: Model, tile: int) -> None:
    """In one pass with jobs of other sizes, masks, steps and guidance, registered, dense and own."""
    edits = [
        whole(),
        whole(steps=6, size=(64, 32), seed=2, true_guidance=2.0, prompt="a blue dog on grass"),
        whole(steps=6, share=0.5, own_steps=(0, 4)),
    ]
    jobs = [make_changed(model, edit, tile) for edit in edits]
    jobs += [make_cached(model, make_edit(steps=5, seed=3), "kv"), prepare(whole(steps=3, seed=4, reuse="off"), model)]
    together = run_changed(model, jobs, tile, 0.5)
    alone = [run_changed(model, [job], tile, 0.5)[0] for job in jobs]
    assert max(apart(one.latents, other.latents) for one, other in zip(together, alone, strict=True)) <= close(model)
    if model.dtype == torch.float32:
        assert [job.num_taken_tokens for job in together] == [job.num_taken_tokens for job in alone]


def test_law_changed_captured_is_uncaptured(model: Model, tile: int) -> None:
    jobs = [make_changed(model, whole(seed=seed, true_guidance=2.0), tile) for seed in (1, 2)]
    captured = run_changed(model, jobs, tile, 0.5, captured=True)
    for one, other in zip(captured, run_changed(model, jobs, tile, 0.5), strict=True):
        assert apart(one.latents, other.latents) <= close(model)


def test_reuse_is_bounded(model: Model, tile: int) -> None:
    """All tokens are computed at the three leading steps and at every third one behind them."""
    job = make_changed(model, whole(steps=9), tile)
    [job] = run_changed(model, [job], tile, 0.6, SURE)
    assert job.num_taken_tokens == 5 * len(job.masked)  # steps 0, 1, 2, 5 and 8
    assert job.num_computed_tokens == round(5 / 9 * len(job.masked))


def test_tiles_compute_some_tokens(model: Model) -> None:
    """A step that computes some tokens reads and keeps rows: the shares between none and all appear."""
    if not model.text_flows:
        pytest.skip("a UNet computes all tokens of a step or none")
    shares = set[float]()
    for threshold in (0.5, 0.35, 0.65, 0.2, 0.8, *(number / 50 for number in range(1, 50))):
        if any(0 < share < 1 for share in shares):
            break  # tokens of a random model differ by little, so the threshold between them is sought
        changed = ChangedTokens(replace(lax(model), tile=1), threshold, model.device)
        engine = Engine(model, own=OwnActivations(model, changed=changed))
        engine.join(job := make_changed(model, whole(steps=9), 1))
        while engine.jobs:
            before = job.num_taken_tokens
            engine.step()
            shares.add((job.num_taken_tokens - before) / len(job.masked))
    assert max(shares) == 1
    assert any(0 < share < 1 for share in shares), shares
    assert job.latents.isfinite().all()


def test_a_job_with_a_template_guesses_between_its_steps(model: Model) -> None:
    job = make_cached(model, make_edit(steps=9), "kv")
    [reused] = run_changed(model, [job], 0, 0.6, SURE)
    assert reused.num_taken_tokens == 5 * len(job.inside)
    assert torch.equal(reused.latents[~job.masked[:, 0]], job.template.clean[~job.masked[:, 0]])


def test_the_shipped_predictor_reads_as_it_was_saved(tmp_path: Any) -> None:
    predictor = read_predictor(DEFAULT_FILE)
    predictor.save(tmp_path / "again.json")
    assert read_predictor(tmp_path / "again.json") == predictor
    assert DEFAULT_FILE.read_text() == (tmp_path / "again.json").read_text()

"""The laws of blocks that choose among the masked tokens of an edit, which reads K and V of the others: those of a
template, or those of its own dense steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cached import KINDS, register_for
from helpers.changed import Way, blocks_of, check_equal_inputs, lax, run_changed, sure
from helpers.edits import apart, close, make_edit, prepare, run

from instgenie.cost.kept_steps import KeptSteps
from instgenie.engine.changed import Changed
from instgenie.engine.loading.loader import Loader
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.register import reuse
from instgenie.jobs.activations import Kind
from instgenie.jobs.job import Job
from instgenie.models.model import Model

BLOCKS = Way(True, 1)


def registered(model: Model, kind: Kind, share: float = 0.5, size: tuple[int, int] = (32, 48), **options: Any) -> Job:
    edit = make_edit("flower", size, share, steps=6, true_guidance=2.0)
    return reuse(prepare(edit, model), register_for(model, edit, kind, **options))


def own(model: Model, steps: int = 6, **fields: Any) -> Job:
    return reuse_own(prepare(make_edit(steps=steps, share=0.5, own_steps=(0, 4), **fields), model))


@pytest.mark.parametrize("kind", KINDS)
def test_law_masked_blocks_over_equal_inputs_are_cached_ones(model: Model, kind: Kind) -> None:
    check_equal_inputs(model, registered(model, kind))


@pytest.mark.parametrize("name", ["blend", "sd3", "klein"])
def test_law_masked_blocks_over_equal_inputs_read_padding(name: str, models: dict[str, Model]) -> None:
    """Text tokens are computed and read from a template, too; tokens are chosen in squares."""
    job = registered(models[name], "kv", size=(64, 64), keeps_text=True)
    assert job.activations
    assert job.num_prompt < job.activations.num_text
    check_equal_inputs(models[name], job, tile=2)


def test_law_masked_tiles_over_equal_inputs_differ_between_levels(models: dict[str, Model]) -> None:
    """The two finest levels have 4 by 4 tiles, of 9 by 9 and of 4 by 4 tokens: the last rows and columns of the finest
    reach over the edge, and other tiles have masked tokens."""
    job = registered(models["sd"], "kv", share=0.28, size=(128, 128))
    sides = ((32, 9), (16, 4))
    assert len({tuple(job.level(side**2).tiles((side, side), tile).active.tolist()) for side, tile in sides}) == 2
    check_equal_inputs(models["sd"], job, tile=9)


def test_law_masked_blocks_over_equal_inputs_read_own_steps(model: Model) -> None:
    engine = Engine(model)
    engine.join(job := own(model, true_guidance=2.0))
    engine.step()
    check_equal_inputs(model, job)


def test_masked_blocks_choose_between_dense_steps(model: Model) -> None:
    """Everything is computed at the dense steps 0 and 4, at the leading steps 1 and 2, and at step 5: what step 2
    computed is reused for two steps at most."""
    plain = own(model)
    engine = Engine(model, own=OwnActivations(model, changed=Changed(sure(BLOCKS), 0.6, model)))
    engine.join(job := replace(plain))
    while not job.done:
        packed = job.blocks and job.blocks.packed
        engine.step()
    assert job.num_taken_tokens == 2 * len(job.masked) + 3 * len(job.inside)
    assert packed
    kept = sum(column.nbytes for one in packed.blocks.values() for column in one.columns)
    assert Changed(sure(BLOCKS), 0.6, model).bytes_of(job) == 2 * kept
    [everything] = run_changed(model, [plain], sure(BLOCKS), 1e-6)
    assert everything.num_taken_tokens == 2 * len(job.masked) + 4 * len(job.inside)
    assert apart(everything.latents, run(model, [plain])[0]) <= close(model)


@pytest.mark.parametrize("name", ["blend", "sd"])
def test_rows_of_blocks_are_apart_while_a_job_does_not_choose(name: str, models: dict[str, Model]) -> None:
    """At step 4 one of two jobs takes a dense step; what it keeps holds no rows of the other."""
    model = models[name]
    jobs = [own(model, true_guidance=2.0), own(model, seed=2), registered(model, "kv")]
    jobs[1].own_steps = KeptSteps(6, (0,))
    engine = Engine(model, own=OwnActivations(model, changed=Changed(sure(BLOCKS), 0.6, model)))
    joined = [replace(job) for job in jobs]
    for job in joined:
        engine.join(job)
    while engine.jobs:
        engine.step()
        nums = [len(next(iter(job.blocks.packed.sizes.values()))) for job in joined if job.blocks and job.blocks.packed]
        step = joined[0].step
        assert nums == ([1] if step == 1 else [1, 2, 2] if step == 5 else [] if step == 6 else [3, 3, 3])
    for job, other in zip(joined, jobs, strict=True):
        [alone] = run_changed(model, [other], sure(BLOCKS), 0.6)
        assert apart(job.latents, alone.latents) <= close(model)


@pytest.mark.parametrize("name", ["blend", "sd"])
def test_masked_blocks_choose_whole_pictures(name: str, models: dict[str, Model]) -> None:
    """With a predictor that reuses everything there is no difference to tokens."""
    model = models[name]
    jobs = [registered(model, "kv"), registered(model, "kv", share=0.3)]
    found, expected = (run_changed(model, jobs, sure(Way(True, tile)), 0.6) for tile in (0, 1))
    for job, other in zip(found, expected, strict=True):
        assert apart(job.latents, other.latents) <= close(model)
        assert job.num_taken_tokens == other.num_taken_tokens == 4 * len(job.inside)


@pytest.mark.parametrize(("name", "max_buffers"), [("blend", 1), ("blend", None), ("sd", 2)])
def test_masked_blocks_read_rows_that_are_loaded(name: str, models: dict[str, Model], max_buffers: int | None) -> None:
    """Packed rows come block after block, whichever blocks compute any token."""
    model = models[name]
    jobs = [registered(model, "kv", cache_dtype="int4"), registered(model, "kv", share=0.3, cache_dtype="int4")]
    for predictor, threshold in ((sure(BLOCKS), 0.6), (lax(model, blocks_of(model)), 0.5)):
        engine = Engine(
            model,
            own=OwnActivations(model, changed=Changed(predictor, threshold, model)),
            loader=Loader(model, max_buffers),
        )
        together = [replace(job) for job in jobs]
        for job in together:
            engine.join(job)
        while engine.jobs:
            engine.step()
        alone = [run_changed(model, [job], predictor, threshold)[0] for job in jobs]
        for job, other in zip(together, alone, strict=True):
            assert apart(job.latents, other.latents) <= close(model)
            assert job.num_taken_tokens < 6 * len(job.inside)
            if model.dtype == torch.float32:
                assert job.num_taken_tokens == other.num_taken_tokens


def test_blocks_do_not_choose_where_a_plan_computes_any_in_full(models: dict[str, Model]) -> None:
    model = models["blend"]
    job = registered(model, "kv")
    job.plan = (False, *job.plan[1:])
    [found] = run_changed(model, [job], sure(blocks_of(model)), 0.6)
    assert found.blocks
    assert not found.blocks.num_computed
    assert torch.equal(found.latents, run(model, [job])[0])


def test_blocks_do_not_choose_where_convolutions_compute_masked_tiles(models: dict[str, Model]) -> None:
    model = models["sd"].with_convolutions("reused")
    [found] = run_changed(model, [job := own(model)], sure(BLOCKS), 0.6)
    assert found.blocks is None
    assert torch.equal(found.latents, run(model, [job])[0])

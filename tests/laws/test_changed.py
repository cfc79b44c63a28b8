"""The laws of reusing what hardly changes: whole steps on every family; tokens and tiles, which are chosen before each
block, where blocks can."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cached import make_cached
from helpers.changed import STEPS, Way, blocks_of, check_equal_inputs, lax, run_changed, sure, whole
from helpers.edits import apart, close, make_edit, prepare, run
from helpers.qwen import several_pictures
from torch import Tensor

from instgenie.engine.changed import Changed
from instgenie.engine.graphs import Graphs
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.reuse_predictor import DEFAULT_FILE, read_predictor
from instgenie.jobs.blocks import BlockPass, KeptUnits
from instgenie.jobs.job import Job, chooses, reads_others
from instgenie.models.model import Model
from instgenie.models.qwen.model import QwenEditModel
from instgenie.models.unet.passes import UnetPasses


@pytest.fixture(params=["steps", "blocks"])
def way(request: pytest.FixtureRequest, model: Model) -> Way:
    """Tiles of a UNet reach over the edges of its pictures."""
    return STEPS if request.param == "steps" else blocks_of(model)


@pytest.fixture
def blocks(model: Model) -> Way:
    return blocks_of(model)


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
    captured = run_changed(model, jobs, predictor, 0.5, Graphs(model))
    for one, other in zip(captured, run_changed(model, jobs, predictor, 0.5), strict=True):
        assert apart(one.latents, other.latents) <= close(model)


def test_jobs_that_choose_keep_no_other_from_a_captured_pass(model: Model, blocks: Way) -> None:
    """Alone or beside a job whose blocks choose, the same passes of the others are captured."""
    predictor = lax(model, blocks)
    others = [make_cached(model, make_edit(steps=5, seed=3), "kv"), prepare(whole(steps=5, reuse="off"), model)]
    jobs = [prepare(whole(steps=6), model), *others]
    apart_from, beside = Graphs(model, max_readers=99), Graphs(model, max_readers=99)
    run_changed(model, others, predictor, 0.5, apart_from)
    found = run_changed(model, jobs, predictor, 0.5, beside)
    assert apart_from.captured
    assert list(beside.captured) == list(apart_from.captured)
    for one, other in zip(found, run_changed(model, jobs, predictor, 0.5), strict=True):
        assert apart(one.latents, other.latents) <= close(model)


def test_a_job_without_room_for_rows_of_blocks_computes_everything(
    model: Model, blocks: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, own=OwnActivations(model, changed=Changed(sure(blocks), 0.6, model)))
    engine.join(job := prepare(whole(steps=5), model))
    engine.step()
    assert job.blocks
    monkeypatch.setattr(BlockPass, "complete", run_out_of_memory)
    while engine.jobs:
        assert not engine.step(isolate_failures=True).failed
    assert job.blocks is None
    assert job.num_taken_tokens == 5 * len(job.masked)
    assert apart(job.latents, run(model, [prepare(job.edit, model)])[0]) <= close(model)


def run_out_of_memory(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_reuse_is_bounded(model: Model, way: Way) -> None:
    """Everything is computed at the three leading steps and at every third one behind them."""
    [job] = run_changed(model, [prepare(whole(steps=9), model)], sure(way), 0.6)
    assert job.num_taken_tokens == 5 * len(job.masked)  # steps 0, 1, 2, 5 and 8
    assert job.num_computed_tokens == round(5 / 9 * len(job.masked))


def test_law_reuse_of_equal_inputs_is_dense(model: Model) -> None:
    check_equal_inputs(model, prepare(whole(steps=5, true_guidance=2.0), model))


def test_law_reuse_of_equal_inputs_is_dense_with_clean_references(models: dict[str, Model]) -> None:
    model = models["qwen_edit"]
    assert isinstance(model, QwenEditModel)
    clean = several_pictures(model, clean=True)
    check_equal_inputs(clean, prepare(whole(steps=5, true_guidance=2.0), clean))


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


@pytest.mark.parametrize("is_done", [True, False])
def test_what_a_job_keeps_goes_with_it(models: dict[str, Model], is_done: bool) -> None:
    """Though a captured pass goes on, for which the loader has nothing to do."""
    model = models["blend"]
    changed = Changed(sure(blocks_of(model)), 0.6, model)
    engine = Engine(model, graphs=Graphs(model), own=OwnActivations(model, changed=changed))
    job = reuse_own(prepare(whole(steps=4, share=0.5, own_steps=(0, 1)), model))
    engine.join(job)
    engine.join(prepare(whole(steps=6, reuse="off"), model))
    while job.step < 3:
        engine.step()
    blocks, own = job.blocks, weakref.ref(job.activations)
    assert blocks
    assert blocks.packed
    if is_done:
        engine.step()
    else:
        engine.leave(job)
        engine.step()
    assert len(engine.jobs) == 1
    del job
    gc.collect()
    assert (blocks.packed, own()) == (None, None)


@pytest.mark.parametrize("trust", [0.0, 0.8])
def test_the_memory_of_rows_is_counted(model: Model, blocks: Way, trust: float) -> None:
    """To the byte: twice what a job keeps, because rows before a pass and behind it lie side by side."""
    job = prepare(whole(size=(64, 32), true_guidance=2.0), model)
    changed = Changed(replace(sure(blocks), trust=trust), 0.5, model)
    expected = changed.bytes_of(job)
    engine = Engine(model, own=OwnActivations(model, changed=changed))
    engine.join(job)
    engine.step()
    assert job.blocks
    assert job.blocks.packed
    kept = sum(column.nbytes for one in job.blocks.packed.blocks.values() for column in one.columns)
    assert expected == changed.bytes_of(job) == 2 * kept
    small = Changed(changed.predictor, 0.5, model, max_bytes=expected - 1)
    small.welcome(other := prepare(job.edit, model))
    assert (other.blocks, other.reuses_changed, small.bytes_of(other)) == (None, False, 0)


@pytest.mark.parametrize("name", ["blend", "sd"])
def test_the_memory_of_rows_is_counted_once(
    name: str, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = models[name], list[bool]()
    kept_units = type(model).kept_units

    def note(model: Model, job: Job, side: int) -> list[KeptUnits]:
        counted.append(reads_others(job))
        return kept_units(model, job, side)

    monkeypatch.setattr(type(model), "kept_units", note)
    changed = Changed(sure(blocks_of(model)), 0.5, model)
    dense = prepare(whole(share=0.5), model)
    job = reuse_own(dense)
    assert [changed.bytes_of(one) for one in (dense, job)] == [changed.bytes_of(one) for one in (dense, job)]
    job.own_steps = None
    assert changed.bytes_of(job) == changed.bytes_of(dense)
    assert counted == [False, True, False]


def test_a_job_chooses_nothing_where_no_block_can(models: dict[str, Model]) -> None:
    """A convolution of this UNet wraps around the edge of pictures, which its tiles do not know."""
    model = models["sd"]
    assert isinstance(model, UnetPasses)
    model = replace(model, unet=copy.deepcopy(model.unet))
    model.unet.mid_block.resnets[0].conv1.padding_mode = "circular"
    changed = Changed(sure(blocks_of(model)), 0.6, model)
    changed.welcome(job := prepare(whole(), model))
    assert (job.blocks, job.reuses_changed, chooses(job), changed.bytes_of(job)) == (None, False, False, 0)


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

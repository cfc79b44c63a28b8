"""Captured passes against uncaptured ones: the same jobs give the same numbers. On a CPU nothing is captured, but the
passes run over padded lists, over fixed tensors and with rows read by address, as they do in a graph."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cached import register_for
from helpers.edits import apart, close, make_edit, prepare, run
from helpers.names import FAMILIES

from instgenie.cache.host import HostTier
from instgenie.cost.plan import Plan
from instgenie.engine.captures import FixedTensors
from instgenie.engine.graphs import Graphs, make_graphs
from instgenie.engine.loading.staging import Staging, find_pieces
from instgenie.engine.loop import Engine
from instgenie.engine.register import register, reuse
from instgenie.jobs.activations import Activations, Kind, Span
from instgenie.jobs.job import Job
from instgenie.models.joint.model import JointModel
from instgenie.models.loading.load import load
from instgenie.models.model import Model
from instgenie.types import CacheDtype

EDITS: list[dict[str, Any]] = [
    {"steps": 2, "share": 0.1, "seed": 1},
    {"steps": 2, "share": 0.3, "seed": 4, "true_guidance": 2.0},
    {"steps": 4, "share": 0.9, "size": (64, 32), "prompt": "a blue dog on grass", "true_guidance": 3.0},
    {"steps": 3, "share": 0.4, "picture_seed": 1, "guidance": 9.0, "true_guidance": 1.5},
    {"steps": 4, "share": 0.2, "seed": 3, "prompt": "flower", "dense_steps": 2},
    {"steps": 2, "share": 1.0, "size": (32, 32), "prompt": ""},
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def make_jobs(model: Model, kind: Kind | None, edits: Sequence[dict[str, Any]] = EDITS, **fields: Any) -> list[Job]:
    jobs = []
    for own in edits:
        edit = make_edit(**own | fields)
        job = prepare(edit, model)
        if kind:
            job = reuse(job, register_for(model, edit, kind))
        jobs.append(job)
    return jobs


def run_captured(graphs: Graphs, given: Sequence[Job]) -> list[torch.Tensor]:
    jobs = [replace(job) for job in given]
    engine = Engine(graphs.model, graphs=graphs)
    for job in jobs:
        engine.join(job)
    while engine.jobs:
        engine.step()
    return [job.latents for job in jobs]


def make_strips(model: Model, *nums_columns: int) -> list[Job]:
    """Jobs of one template with two rows of masked tokens each."""
    edit = make_edit(size=(256, 256), steps=1)
    activations = register(edit.picture, model, edit.size, edit.steps, edit.guidance)
    jobs = []
    for num_columns in nums_columns:
        mask = np.zeros((256, 256), dtype=np.bool_)
        mask[: 2 * model.patch, : num_columns * model.patch] = True
        jobs.append(reuse(prepare(replace(edit, mask=mask), model), activations))
    return jobs


@pytest.mark.parametrize("kind", ["kv", "y", None])
def test_law_2_captured_is_uncaptured(model: Model, kind: Kind | None) -> None:
    """Jobs leave one after the other; in the second round all signatures are known."""
    jobs, graphs = make_jobs(model, kind), Graphs(model, max_readers=99)
    expected = run(model, jobs)
    for _ in range(2):
        assert max(map(apart, run_captured(graphs, jobs), expected)) <= close(model)
    assert graphs.captured
    assert not graphs.refused
    num_captured = len(graphs.captured)
    others = make_jobs(model, kind, prompt="grass", seed=9)
    assert max(map(apart, run_captured(graphs, others), run(model, others))) <= close(model)
    if model.num_flowing_text or not model.text_flows:  # prompts are padded to one length
        assert len(graphs.captured) == num_captured  # other values, but no other signature
    for job in jobs[:2]:
        [expected] = run(model, [job])
        for _ in range(2):
            assert apart(*run_captured(graphs, [job]), expected) <= close(model)


def test_law_5_jobs_join_and_leave_captured_passes(model: Model) -> None:
    jobs = make_jobs(model, "kv")
    alone = [run(model, [job])[0] for job in jobs]
    graphs = Graphs(model)
    for _ in range(2):
        joining = [replace(job) for job in jobs]
        engine, arrivals = Engine(model, max_jobs=3, graphs=graphs), iter(joining)
        engine.join(next(arrivals))
        while engine.jobs:
            engine.step()
            if (arrival := next(arrivals, None)) is not None:
                engine.join(arrival)
        assert max(apart(job.latents, latents) for job, latents in zip(joining, alone, strict=True)) <= close(model)
    assert graphs.captured
    assert not graphs.refused


@pytest.mark.parametrize("kind", ["kv", "y"])
def test_law_4_captured_plans(model: Model, kind: Kind) -> None:
    """A dense prefix, and for y alternating blocks."""
    [job] = make_jobs(model, kind, EDITS[1:2])
    blocks = range(sum(model.run_lengths))
    plans: list[Plan] = [tuple(block > 0 for block in blocks)]
    plans += [tuple(block % 2 == odd for block in blocks) for odd in (0, 1)] if kind == "y" else []
    for plan in plans:
        planned, graphs = replace(job, plan=plan), Graphs(model)
        [expected] = run(model, [planned])
        for _ in range(2):
            assert apart(*run_captured(graphs, [planned]), expected) <= close(model)
        assert graphs.captured


def test_kinds_do_not_mix_in_a_captured_pass(model: Model) -> None:
    jobs = [*make_jobs(model, "kv", EDITS[:1]), *make_jobs(model, "y", EDITS[:1])]
    graphs = Graphs(model)
    assert max(map(apart, run_captured(graphs, jobs), run(model, jobs))) <= close(model)
    assert not graphs.captured
    assert len(graphs.reasons) == 1


def test_large_batches_are_not_captured(model: Model) -> None:
    jobs, graphs = make_jobs(model, None, EDITS[:1] * 3), Graphs(model, max_readers=2)
    run_captured(graphs, jobs)
    assert not graphs.captured
    run_captured(graphs, jobs[:1])
    assert graphs.captured


def test_the_least_recently_used_is_dropped(model: Model) -> None:
    first, second = make_jobs(model, None, EDITS[:1]), make_jobs(model, None, EDITS[2:3])
    graphs = Graphs(model, max_graphs=1)
    run_captured(graphs, first)
    [known] = graphs.captured
    run_captured(graphs, second)
    assert len(graphs.captured) == 1
    assert known not in graphs.captured


def test_a_pass_that_cannot_be_captured_still_runs(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["sd"]
    [job], graphs = make_jobs(model, "kv", EDITS[:1]), Graphs(model)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory left\nlong story")

    monkeypatch.setattr(graphs, "capture", fail)
    assert apart(*run_captured(graphs, [job]), *run(model, [job])) <= close(model)
    assert graphs.reasons == {"no memory left"}
    assert graphs.refused
    assert not graphs.captured


def test_masks_of_about_one_size_share_a_pass(models: dict[str, Model]) -> None:
    """Lists are padded; a signature does not depend on which tokens are in them."""
    model = models["builtin"]
    jobs = make_strips(model, 13, 15, 5)
    batches = [model.pack([job], pads=True) for job in jobs]
    assert batches[0].signature == batches[1].signature != batches[2].signature
    assert len({len(job.inside) for job in jobs}) == 3
    assert isinstance(model, JointModel)
    for job, batch in zip(jobs, batches, strict=True):
        [[padded]], [[plain]] = batch.deal(model.run(batch)), model.predict([job])
        assert padded.shape == plain.shape
        assert apart(padded, plain) <= close(model)


def test_columns_are_copied_when_they_change() -> None:
    tensors = FixedTensors()
    source = torch.zeros(3)
    fixed = tensors.take("x", source)
    fixed.copy(source)
    fixed.tensor += 1
    fixed.copy(source)
    assert fixed.tensor.tolist() == [1, 1, 1]  # it was there already
    fixed.copy(torch.full((3,), 2.0))
    assert fixed.tensor.tolist() == [2, 2, 2]
    fixed.copy(source)
    assert fixed.tensor.tolist() == [0, 0, 0]
    assert tensors.take("x", torch.ones(3)) is fixed
    assert tensors.take("x", torch.zeros(4)) is not fixed
    assert tensors.take("y", source) is not fixed


def test_a_cpu_has_no_graphs(models: dict[str, Model]) -> None:
    assert make_graphs(models["sd"]) is None


@torch.inference_mode()
@pytest.mark.parametrize("family", ["blend", "sdxl"])
def test_the_order_of_jobs_does_not_change_the_pass(family: str, models: dict[str, Model]) -> None:
    graphs = Graphs(models[family], max_readers=99)
    first, second = make_jobs(models[family], "kv", EDITS[:1]), make_jobs(models[family], "kv", EDITS[:1], share=0.6)
    expected = models[family].predict([*first, *second])
    for _ in range(2):
        graphs.predict([*first, *second])
    found = graphs.predict([*second, *first])
    assert len(graphs.captured) == 1
    assert all(apart(*pair) <= close(models[family]) for pair in zip(found[1], expected[0], strict=True))


@torch.inference_mode()
def test_rows_are_brought_a_step_ahead(models: dict[str, Model]) -> None:
    model = models["sdxl"]
    first, second = make_jobs(model, "kv", EDITS[:1], steps=3), make_jobs(model, "kv", EDITS[3:4])
    jobs = [*first, replace(first[0]), *second]
    staging = Staging(model.device, max_bytes=2**30)
    assert staging.has_room(jobs)
    staging.bring(jobs)
    assert len(staging.staged) == 2  # edits of one template share them
    for job in jobs:
        assert job.activations
        assert staging.addresses(job, 0) == job.activations.addresses(job.step, 0)  # on a CPU nothing is copied
        assert staging.addresses(job, 1) == job.activations.addresses(job.step, 1)
    staging.look_ahead(jobs)
    assert len(staging.staged) == 4
    for job in jobs:
        job.step += 1
    staging.bring(jobs)
    assert len(staging.staged) == 4
    staging.look_ahead(jobs[:2])
    assert len(staging.staged) == 2
    narrow = Staging(model.device, max_bytes=2**10)
    assert not narrow.has_room(jobs)
    narrow.bring(jobs)
    narrow.look_ahead(jobs)
    assert len(narrow.staged) == 2  # rows of the present step stay


@torch.inference_mode()
def test_only_rows_that_are_read_are_brought_and_also_after_dense_steps(models: dict[str, Model]) -> None:
    [job] = make_jobs(models["blend"], "kv", EDITS[:1])
    assert job.activations
    num_places = len(job.activations.rows)
    job = replace(job, edit=replace(job.edit, dense_steps=1), plan=(False, *(True,) * (num_places - 1)))
    staging = Staging(job.device, max_bytes=2**30)
    staging.bring([job])
    assert not staging.staged
    staging.look_ahead([job])
    job.step = 1
    staging.bring([job])
    [staged] = staging.staged.values()
    assert {place for place, _ in staged.addresses} == set(range(1, num_places))
    assert staging.addresses(job, 0) == [0, *job.activations.addresses(1, 0)[1:]]


@torch.inference_mode()
@pytest.mark.parametrize("cache_dtype", ["model", "fp8", "int4"])
@pytest.mark.parametrize("kind", ["kv", "y"])
def test_a_step_that_lies_in_one_piece_moves_as_one(model: Model, kind: Kind, cache_dtype: CacheDtype) -> None:
    edit = make_edit(**EDITS[0])
    near = register(edit.picture, model, edit.size, edit.steps, edit.guidance, kind, cache_dtype=cache_dtype)
    tier = HostTier(2**30)
    tier.store(near.key, Span(near.key.slots, near.rows, near.time))
    span = tier.load(near.key, near.key.slots)
    assert span
    far, places = replace(near, rows=span.rows), range(len(near.rows))
    [piece] = find_pieces(far, 1, places)
    assert len(find_pieces(far, 1, [*places[:1], *places[2:]])) == 2
    parcel = piece.pack(model.device)
    parcel.send()
    found = {key: parcel.memory[offset:] for key, offset in parcel.offsets.items()}
    assert list(found) == list(itertools.product(places, range(near.num_branches)))
    for key, brought in found.items():
        expected = near.kept(1, *key)
        assert torch.equal(brought[: expected.nbytes].view(expected.dtype).view(expected.shape), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kv", "y"])
@pytest.mark.parametrize("family", ["blend_guided", "sdxl", "sd3", "klein", "zimage"])
def test_rows_in_main_memory_are_captured_too(family: str, kind: Kind, folders: dict[str, Path]) -> None:
    """Results are bit-identical for jobs at different steps."""
    model = load(str(folders[family]), "cuda")
    near = make_jobs(model, kind, EDITS[:2] + EDITS[3:4])
    far = [replace(job, activations=in_main_memory(job)) for job in near]
    near_graphs, far_graphs = Graphs(model), Graphs(model)
    for _ in range(2):
        assert max(map(apart, run_captured(near_graphs, near), run_captured(far_graphs, far))) == 0
    assert far_graphs.captured
    assert not far_graphs.reasons


def in_main_memory(job: Job) -> Activations:
    assert job.activations
    key, tier = job.activations.key, HostTier(2**30)
    tier.store(key, Span(key.slots, job.activations.rows, job.activations.time))
    span = tier.load(key, key.slots)
    assert span
    return replace(job.activations, rows=span.rows)

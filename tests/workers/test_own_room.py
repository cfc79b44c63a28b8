"""Jobs that keep activations for themselves wait for memory before they join."""

from dataclasses import replace

import pytest
from helpers.edits import make_edit

from instgenie.engine.changed import Changed
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, make_room, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.reuse_predictor import ReusePredictor
from instgenie.jobs.blocks import BLOCK_FEATURES
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.workers.own_room import OwnRoom

BY_BLOCKS = ReusePredictor((0.0,) * len(BLOCK_FEATURES), 0.0, 0.05, 2, per_block=True, tile=4)
FIELDS = {"steps": 6, "own_steps": (0, 3)}


@pytest.fixture
def job(model: Model) -> Job:
    return reuse_own(prepare(make_edit(**FIELDS), model))


def test_the_room_is_what_a_job_takes(model: Model, job: Job) -> None:
    room = OwnRoom(model, 2**40)
    make_room(job, model, room.network, "kv")
    assert job.activations
    assert (
        sum(rows.nbytes for rows in job.activations.rows) <= room.bytes_of(job) < 1.2 * job.activations.num_bytes + 4096
    )
    assert room.bytes_of(prepare(make_edit(), model)) == 0
    num_text = model.num_flowing_text
    with_text = OwnRoom(model, 2**40, num_text).bytes_of(job)
    assert with_text == pytest.approx(room.bytes_of(job) * (1 + num_text / len(job.masked)), rel=0.1)


def test_jobs_wait_for_room_and_others_overtake_them(model: Model, job: Job) -> None:
    room = OwnRoom(model, 2 * OwnRoom(model, 0).bytes_of(job))
    dense = prepare(make_edit(), model)
    groups = [[replace(job)], [replace(job)], [dense], [replace(job)]]
    assert list(room.grant(groups, running=[])) == [True, True, True, False]
    assert list(room.grant(groups, running=[job])) == [True, False, True, False]
    assert list(room.grant([[job]], running=[replace(job), replace(job)])) == [False]


def test_jobs_wait_for_room_for_rows_of_blocks(model: Model) -> None:
    changed = Changed(BY_BLOCKS, 0.5, model)
    jobs = [prepare(make_edit(steps=6, share=1.0, from_nothing=True, reuse="own"), model) for _ in range(3)]
    room = OwnRoom(model, 2 * changed.bytes_of(jobs[0]), changed=changed)
    assert list(room.grant([[job] for job in jobs], running=[])) == [True, True, False]
    changed.welcome(jobs[0])
    jobs[1].reuses_changed = True  # it had no room for rows, and keeps none any more
    assert list(room.grant([jobs[2:]], running=jobs[:2])) == [True]
    assert list(room.cut(jobs)) == [3]


def test_preempted_jobs_wait_for_rows_of_blocks_alone(model: Model, job: Job) -> None:
    """They hold what their dense steps left, so that a job which needs all of the room never goes before them."""
    changed = Changed(BY_BLOCKS, 0.5, model)
    changed.welcome(job)
    room = OwnRoom(model, OwnRoom(model, 0, changed=changed).bytes_of(job), changed=changed)
    other = replace(job)
    assert list(room.grant([[other], [job]], running=[], preempted=[job])) == [False, True]
    assert list(room.grant([[job]], running=[other], preempted=[job])) == [False]


def test_rows_of_blocks_find_room_beside_what_dense_steps_leave(model: Model, job: Job) -> None:
    own_bytes = OwnRoom(model, 0).bytes_of(job)
    max_bytes = own_bytes + Changed(BY_BLOCKS, 0.5, model).bytes_of(job)
    for spare, takes_all in ((0, True), (-1, False)):
        changed = Changed(BY_BLOCKS, 0.5, model, max_bytes + spare)
        found = OwnRoom(model, max_bytes + spare, changed=changed).bytes_of(job)
        OwnActivations(model, changed=changed).welcome(one := replace(job))
        assert (found, one.blocks is not None) == (max_bytes if takes_all else own_bytes, takes_all)


def test_a_request_for_many_pictures_is_cut_into_parts_that_fit(model: Model, job: Job) -> None:
    one = OwnRoom(model, 0).bytes_of(job)
    assert list(OwnRoom(model, 2 * one).cut([job] * 5)) == [2, 2, 1]
    assert list(OwnRoom(model, 9 * one).cut([job] * 5)) == [5]
    assert list(OwnRoom(model, one).cut([])) == []


def test_a_job_that_never_finds_room_computes_every_token(model: Model) -> None:
    job = prepare(make_edit(**FIELDS), model)
    assert OwnRoom(model, 1).reuse_own(job) is job
    assert OwnRoom(model, 2**40).reuse_own(job).own_steps


def test_memory_that_runs_out_makes_a_job_dense(model: Model, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("instgenie.engine.own.make_room", refuse)
    engine = Engine(model)
    engine.join(job)
    while engine.jobs:
        engine.step()
    assert job.own_steps is None
    assert job.num_computed_tokens == len(job.masked)

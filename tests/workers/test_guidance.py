"""A worker and its companion, message by message: here a thread of the test turns the loop of the companion."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import zmq
from helpers.cached import register_for
from helpers.changed import blocks_of, sure
from helpers.edits import apart, close, make_edit, run

from instgenie.cluster.orders import GuidanceFacts
from instgenie.engine.changed import Changed
from instgenie.engine.guidance import can_split
from instgenie.engine.loop import Engine
from instgenie.engine.own import OwnActivations, reuse_own
from instgenie.engine.prepare import prepare
from instgenie.engine.register import reuse
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.workers import far_branches
from instgenie.workers.far_branches import (
    BranchLostError,
    Companion,
    repeats_branch,
    settle_branches,
    split_branches,
)
from instgenie.workers.guidance import BranchService

GUIDED = {"true_guidance": 3.0, "negative_prompt": "sky", "steps": 6}


class QuietLine:
    """The line of a process whose cluster never says anything."""

    def receive(self, wait: bool) -> None:
        return None


@pytest.fixture(params=["sd", "sd3", "blend"])
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture
def service(model: Model, tmp_path: Path) -> Iterator[BranchService]:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/g")
    line: Any = QuietLine()
    made = BranchService(Engine(model), socket, line)
    yield made
    made.socket.close(linger=0)
    context.term()


@pytest.fixture
def companion(tmp_path: Path, service: BranchService) -> Iterator[Companion]:
    made = Companion(f"ipc://{tmp_path}/g")
    until(lambda: bool(service.hear(wait=False)) or made.is_up)
    yield made
    made.stop()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def turning(service: BranchService) -> Iterator[None]:
    """Turn the loop of the companion in a thread."""
    is_over = Event()

    def turn() -> None:
        while not is_over.wait(0.001):
            service.hear(wait=False)
            service.work()

    thread = Thread(target=turn)
    thread.start()
    yield
    is_over.set()
    thread.join()


def some_jobs(model: Model) -> list[Job]:
    """Edits that compute every token, and some that read what their own dense steps left, of several sizes."""
    edits = [
        make_edit(**GUIDED, share=0.3),
        make_edit(**GUIDED, share=0.2, seed=3, prompt="a blue dog on grass"),
        make_edit(**GUIDED | {"steps": 4}, size=(64, 32), picture_seed=2),
        make_edit(steps=3, guidance=1.0),  # one branch, if the model has no other use for guidance
    ]
    jobs = [prepare(edit, model) for edit in edits]
    return [reuse_own(job) if number in (0, 1) else job for number, job in enumerate(jobs)]


def test_law_two_processes_are_one(model: Model, service: BranchService, companion: Companion) -> None:
    jobs = some_jobs(model)
    expected = run(model, jobs)
    split = [companion.split(replace(job)) for job in jobs]
    assert [len(job.branches) for job in split] == [1, 1, 1, 1]
    assert companion.num_split == sum(len(job.branches) == 2 for job in jobs) >= 3
    engine = Engine(model, far=companion)
    with turning(service):
        for job in split:
            engine.join(job)
        while engine.jobs:
            engine.step()
        for job in split:
            companion.close(job)
        until(lambda: not service.jobs)
    assert max(map(apart, (job.latents for job in split), expected)) <= close(model)


def test_a_companion_that_forgets_everything_costs_a_step(
    model: Model, service: BranchService, companion: Companion
) -> None:
    """As one that was started again in the middle of the edits: it computes their latest dense steps again."""
    jobs = some_jobs(model)[:3]
    expected = run(model, jobs)
    split = [companion.split(replace(job)) for job in jobs]
    engine = Engine(model, far=companion)
    with turning(service):
        for job in split:
            engine.join(job)
        for step in range(100):
            if not engine.jobs:
                break
            if step in (1, 4):
                until(lambda: not service.pending)
                service.jobs = {}
            assert not engine.step(isolate_failures=True).failed  # the step is tried again, in halves
    assert companion.num_opened == 3 + 3 + 2  # all of them, and those that are left when it forgets
    assert max(map(apart, (job.latents for job in split), expected)) <= close(model)


def test_a_death_is_noticed_and_the_next_one_is_greeted(
    model: Model, service: BranchService, companion: Companion, tmp_path: Path
) -> None:
    job = companion.split(prepare(make_edit(**GUIDED), model))
    companion.begin([job])
    context = service.socket.context
    service.socket.close(linger=0)  # as if it were killed
    with pytest.raises(BranchLostError, match="it has died"):
        companion.result(job, job.latents)
    assert companion.awaits(job)
    assert not companion.is_up
    whole = prepare(make_edit(**GUIDED), model)
    assert companion.split(whole) is whole  # nobody is there
    service.socket = context.socket(zmq.ROUTER)
    service.socket.bind(f"ipc://{tmp_path}/g")
    with turning(service):
        until(lambda: companion.is_up)
        assert not companion.awaits(job)
        companion.begin([job])
        assert len(companion.result(job, job.latents)) == 1


@dataclass(eq=False)
class Tracked:
    job: Job
    id: str = "job"
    guidance: GuidanceFacts | None = None


@pytest.mark.parametrize("why", ["too long", "too often"])
def test_an_edit_without_a_companion_goes_on_alone(
    model: Model, service: BranchService, companion: Companion, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    whole = reuse_own(prepare(make_edit(**GUIDED, share=0.3), model))
    tracked = Tracked(replace(whole))
    split_branches(companion, tracked)
    changed = Changed(sure(blocks_of(model)), 0.6, model)
    engine = Engine(model, far=companion, own=OwnActivations(model, changed=changed))
    engine.join(tracked.job)
    running = {tracked.job: tracked}
    with turning(service):
        for _ in range(2):
            engine.step()
    if why == "too long":
        service.socket.close(linger=0)
        until(lambda: not companion.is_up)
        [error] = engine.step(isolate_failures=True).failed.values()
        assert repeats_branch(companion, tracked, error, engine)
        settle_branches(companion, running, engine)
        assert engine.pick() == []  # it waits for another one
        monkeypatch.setattr(far_branches, "SECONDS_TO_WAIT", 0.0)
    else:
        for number in range(far_branches.MAX_REPEATS + 1):
            engine.leave(tracked.job)
            assert repeats_branch(companion, tracked, BranchLostError(str(number)), engine)
    settle_branches(companion, running, engine)
    assert list(running) == engine.pick() == [tracked.job]
    assert len(tracked.job.branches) == 2
    assert tracked.job.blocks is None  # nobody has asked for room
    assert tracked.guidance == GuidanceFacts(1 if why == "too long" else far_branches.MAX_REPEATS + 1, is_alone=True)
    while engine.jobs:
        engine.step()
    assert tracked.job.done
    dense = run(model, [replace(whole, own_steps=None)])[0]
    assert apart(tracked.job.latents, dense) < 1.0  # the same picture, with one dense step more


def test_what_is_near_one_device_is_not_split(model: Model, companion: Companion) -> None:
    whole = prepare(make_edit(**GUIDED, share=0.3), model)
    assert can_split(whole)
    with_template = reuse(whole, register_for(model, whole.edit, "kv"))
    one_branch = replace(whole, branches=whole.branches[:1])
    later = replace(whole, step=1)
    watching = replace(whole, edit=replace(whole.edit, max_change=0.1))
    for job in (with_template, one_branch, later, watching):
        assert not can_split(job)
        assert companion.split(job) is job

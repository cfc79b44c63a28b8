"""Jobs that leave the batch for others: they go on where they were, and end with the same picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.changed import choose_by_blocks
from helpers.edits import make_edit
from helpers.workers import (
    SIZE,
    Tape,
    batches,
    denoiser_of,
    found,
    head_of,
    jobs,
    make_config,
    memory_status,
    register_on_disk,
    with_terms,
)

from instgenie.cluster import wire
from instgenie.engine.loop import Engine
from instgenie.engine.own import reuse_own
from instgenie.engine.prepare import prepare
from instgenie.jobs.job import Job
from instgenie.models.model import Model
from instgenie.scheduling.names import Scheduling
from instgenie.workers.denoise import Denoiser
from instgenie.workers.locker import Locker
from instgenie.workers.queue import MAX_OVERTAKEN

NUM_STEPS = 12


def make_single(
    model: Model, scheduling: Scheduling = "preemptive", reuse_changed: float = 0.0, **cache: Any
) -> tuple[Denoiser, Tape]:
    """A worker whose batch has room for one job."""
    options: dict[str, Any] = {"scheduling": scheduling, "reuse_changed": reuse_changed}
    return denoiser_of(replace(make_config(max_batch_size=1, **cache), **options), model)


def latents_of(tape: Tape, name: str) -> bytes:
    [frame] = [frames[0] for message, frames in tape.sent if isinstance(message, wire.Denoised) and message.id == name]
    return bytes(frame)


def feed_after(tape: Tape, name: str, step: int, messages: list[Any]) -> None:
    """Play messages once the job of this name has taken so many steps."""
    send = tape.send

    def send_and_feed(message: wire.Message, frames: Any = ()) -> None:
        send(message, frames)
        if isinstance(message, wire.BatchStepped) and (message.jobs[0].id, message.jobs[0].step) == (name, step):
            tape.rounds.append(messages)

    tape.send = send_and_feed  # type: ignore[method-assign]


def urgent(model: Model, number: int) -> tuple[wire.Message, list[wire.Frame]]:
    return with_terms(jobs(model, (f"b{number}", 1)), priority=-1, number=number)


@pytest.mark.parametrize("kind", ["dense", "own", "template"])
def test_law_an_edit_that_is_preempted_ten_times_is_the_same(small: Model, tmp_path: Path, kind: str) -> None:
    template = head_of("t", steps=NUM_STEPS) if kind == "template" else None
    cache = {"disk": str(tmp_path)} if template else {}
    if template:
        register_on_disk(small, tmp_path, "t", steps=NUM_STEPS)
    edit = with_terms(jobs(small, ("a", NUM_STEPS), template=template), may_own=kind == "own")
    quiet, tape_of_quiet = make_single(small, **cache)
    tape_of_quiet.rounds.append([edit])
    quiet.run()
    denoiser, tape = make_single(small, **cache)
    tape.rounds.append([edit])
    send = tape.send

    def send_and_disturb(message: wire.Message, frames: Any = ()) -> None:
        send(message, frames)
        if isinstance(message, wire.BatchStepped) and message.jobs[0].id == "a" and message.jobs[0].step <= 10:
            tape.rounds.append([urgent(small, message.jobs[0].step)])

    tape.send = send_and_disturb  # type: ignore[method-assign]
    denoiser.run()
    preempted = tape.of(wire.Preempted)
    assert [(message.jobs[0].id, message.jobs[0].step, message.by) for message in preempted] == [
        ("a", step, f"b{step}") for step in range(1, 11)
    ]
    assert latents_of(tape, "a") == latents_of(tape_of_quiet, "a")
    assert [message.reuse for message in tape.of(wire.Denoised) if message.id == "a"] == [
        {"dense": "none"}.get(kind, kind)
    ]


def test_other_policies_preempt_nobody(small: Model) -> None:
    for scheduling in ("fcfs", "edf", "slack"):
        denoiser, tape = make_single(small, scheduling)  # type: ignore[arg-type]
        tape.rounds.extend([[jobs(small, ("a", 3))], [urgent(small, 1)], []])
        denoiser.run()
        assert batches(tape) == ["a", "a", "a", "b1"]


def test_jobs_wait_in_the_order_of_the_policy(small: Model) -> None:
    """One job runs while three arrive: with little time, with some, and without a deadline."""
    for scheduling, expected in (("fcfs", "xyz"), ("edf", "zyx"), ("preemptive", "zyx")):
        denoiser, tape = make_single(small, scheduling)  # type: ignore[arg-type]
        tape.rounds.append([jobs(small, ("a", 2))])
        lefts = {"x": float("inf"), "y": 3000.0, "z": 1000.0}
        tape.rounds.append(
            [
                with_terms(jobs(small, (name, 2)), seconds_left=left, number=number)
                for number, (name, left) in enumerate(lefts.items(), 1)
            ]
        )
        denoiser.run()
        assert "".join(dict.fromkeys("".join(batches(tape)))) == "a" + expected


@pytest.mark.parametrize("max_overtaken", [0, MAX_OVERTAKEN])
def test_a_preempted_job_lets_its_template_go_if_another_waits_too_long_for_the_room(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_overtaken: int
) -> None:
    """Memory holds one template. The job of `t` is preempted, and one of `u` waits for room, overdue at once or not. If
    it is not, the job of `t` goes on first and makes room."""
    monkeypatch.setattr("instgenie.workers.queue.MAX_OVERTAKEN", max_overtaken)
    register_on_disk(small, tmp_path, "t", "u")
    [num_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t", "u")}
    denoiser, tape = make_single(small, disk=str(tmp_path), host_bytes=num_bytes)
    denoiser.keyed.held = Locker(2**20, 60.0)
    first = with_terms(jobs(small, ("t", 4), template=head_of("t")), key="key")
    second = with_terms(jobs(small, ("u", 4), template=head_of("u")), priority=-1, number=1)
    short = with_terms(jobs(small, ("s", 1)), priority=-2, number=2)
    tape.rounds.append([first])
    feed_after(tape, "t", 1, [second, short])
    denoiser.run()
    assert sorted(message.id for message in tape.of(wire.Denoised)) == ["s", "t", "u"]
    assert None not in {found(tape)[name] for name in "tu"}
    assert denoiser.keyed.held.names == ["key"]  # its idempotency key was known all the time
    quiet, quiet_tape = make_single(small, disk=str(tmp_path), host_bytes=num_bytes)
    quiet_tape.rounds.append([first])
    quiet.run()
    assert latents_of(tape, "t") == latents_of(quiet_tape, "t")


def test_a_preempted_job_keeps_no_room_for_rows_of_blocks(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds one template, and the rows of blocks of one job. The job of `t` is preempted, and has let go of both
    when that of `u`, which is overdue, waits for them."""
    monkeypatch.setattr("instgenie.workers.queue.MAX_OVERTAKEN", 0)
    changed = choose_by_blocks(small, monkeypatch)
    num_bytes = changed.bytes_of(reuse_own(prepare(make_edit(size=SIZE), small)))
    register_on_disk(small, tmp_path, "t", "u")
    [template_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t", "u")}
    denoiser, tape = make_single(
        small, reuse_changed=0.6, disk=str(tmp_path), host_bytes=template_bytes, own_bytes=num_bytes
    )
    urgent = with_terms(jobs(small, ("u", 4), template=head_of("u")), priority=-1, number=1)
    between = with_terms(jobs(small, ("s", 30), reuse="off"), priority=-2, number=2)  # u's template loads meanwhile
    tape.rounds.append([jobs(small, ("t", 4), template=head_of("t"))])
    feed_after(tape, "t", 1, [urgent, between])
    denoiser.run()
    assert batches(tape) == ["t", *"s" * 30, *"uuuu", *"ttt"]
    assert None not in {found(tape)[name] for name in "tu"}


def test_law_an_engine_that_a_job_leaves_and_joins_again_computes_the_same(model: Model) -> None:
    """On every family: another job takes a step whenever the first is away."""

    def run(num_absences: int) -> torch.Tensor:
        engine = Engine(model)
        job = prepare(make_edit(size=SIZE, steps=4, true_guidance=2.0), model)
        engine.join(job)
        for _ in range(num_absences):
            engine.step()
            engine.leave(job)
            other: Job = prepare(make_edit(size=SIZE, steps=2, seed=3), model)
            engine.join(other)
            engine.step()
            engine.leave(other)
            engine.join(job)
        while engine.jobs:
            engine.step()
        return job.latents

    assert torch.equal(run(3), run(0))


def test_jobs_of_a_tenant_over_its_share_make_way_though_there_is_room(small: Model) -> None:
    """The quiet job runs already when the noisy tenant is found to be over its share: nobody joins as others leave."""
    tape, config = Tape(), make_config(max_batch_size=4)
    denoiser = Denoiser(config, small, tape)  # type: ignore[arg-type]
    tape.is_busy = lambda: denoiser.queue.groups or denoiser.registrar.pending
    noisy = [with_terms(jobs(small, (name, NUM_STEPS)), tenant="noisy", number=at) for at, name in enumerate("ab")]
    quiet = with_terms(jobs(small, ("q", 6)), tenant="quiet", number=5)
    tape.rounds.append([*noisy, quiet])
    send = tape.send

    def send_and_charge(message: wire.Message, frames: Any = ()) -> None:
        send(message, frames)
        if isinstance(message, wire.BatchStepped) and len(tape.of(wire.BatchStepped)) == 2:
            denoiser.policy.charge(["noisy"], 100.0)
            tape.rounds.append([with_terms(jobs(small, ("c", 2)), tenant="noisy", number=9)])

    tape.send = send_and_charge  # type: ignore[method-assign]
    denoiser.run()
    [preempted] = tape.of(wire.Preempted)
    assert ({told.id for told in preempted.jobs}, preempted.by) == ({"a", "b"}, "q")
    assert sorted(message.id for message in tape.of(wire.Denoised)) == ["a", "b", "c", "q"]

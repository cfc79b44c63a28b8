"""Bounds on waiting in a worker: for room in memory, and for an idle moment."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.changed import choose_by_blocks
from helpers.edits import make_edit, prepare
from helpers.workers import (
    SHARED,
    SIZE,
    Tape,
    batches,
    denoiser_of,
    found,
    head_of,
    jobs,
    make_config,
    make_denoiser,
    memory_status,
    register_on_disk,
    registering,
    with_terms,
)

from instgenie.cache.disk import DiskTier
from instgenie.cluster import wire
from instgenie.jobs.activations import Key, Span
from instgenie.models.model import Model
from instgenie.workers.fetching import Fetcher, FetchOutcome
from instgenie.workers.queue import MAX_OVERTAKEN
from instgenie.workers.registrar import MAX_STEPS_WAITED

NUM_FED = 2 * MAX_OVERTAKEN + 8


def on_sent(tape: Tape, act: Callable[[wire.Message], None]) -> None:
    """Have `act` called with each message that the loop sends."""
    send = tape.send

    def send_and_act(message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        send(message, frames)
        act(message)

    tape.send = send_and_act  # type: ignore[method-assign]


def joined(tape: Tape) -> list[str]:
    return [job.id for message in tape.of(wire.Joined) for job in message.jobs]


def test_a_job_is_not_starved_of_memory_by_overlapping_jobs_of_another_template(small: Model, tmp_path: Path) -> None:
    """Memory holds one template, and the next job of `t` always joins before the last one is done."""
    register_on_disk(small, tmp_path, "t", "u")
    [num_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t", "u")}
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=num_bytes)
    denoiser.costs = SHARED
    tape.rounds.append([jobs(small, ("t0", 4), template=head_of("t"))])

    def feed(message: wire.Message) -> None:
        if isinstance(message, wire.Joined) and (name := message.jobs[0].id).startswith("t"):
            next_one = jobs(small, (f"t{int(name[1:]) + 1}", 4), template=head_of("t"))
            if name == "t0":
                tape.rounds.append([jobs(small, ("u", 4), template=head_of("u")), next_one])
            elif int(name[1:]) < NUM_FED:
                tape.rounds.append([next_one])

    on_sent(tape, feed)
    denoiser.run()
    assert len(found(tape)) == NUM_FED + 2
    assert None not in found(tape).values()
    assert MAX_OVERTAKEN < joined(tape).index("u") < 2 * MAX_OVERTAKEN
    assert len(tape.of(wire.Denoised)) == NUM_FED + 2


@pytest.mark.parametrize("order", ["tu", "ut"])
def test_jobs_whose_templates_load_at_the_same_time_both_use_them(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The template `u` is refused while `t`, which takes all the room, is still loading. If the job of `u` is first,
    it is overdue at once and holds the other back, which has its template by then."""
    monkeypatch.setattr("instgenie.workers.queue.MAX_OVERTAKEN", 0 if order == "ut" else MAX_OVERTAKEN)
    register_on_disk(small, tmp_path, "t", "u", steps=8)
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    assert denoiser.templates.store.get(denoiser.templates.keys.find(head_of("t", steps=8)))
    num_bytes = denoiser.templates.store.status()["host"].num_bytes
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=num_bytes)
    key = denoiser.templates.keys.find(head_of("t", steps=8))
    load, why_not = DiskTier.load, Fetcher._why_not
    is_half_loaded, is_refused = threading.Event(), threading.Event()

    def slow_load(tier: DiskTier, asked: Key, steps: range) -> Span | None:
        if asked == key and steps.start:
            is_half_loaded.set()
            assert is_refused.wait(60)
        elif asked != key:
            assert is_half_loaded.wait(60)
        return load(tier, asked, steps)

    def note_refusal(fetcher: Fetcher, asked: Key) -> FetchOutcome:
        threading.Timer(0.2, is_refused.set).start()  # the loop settles the refused job first
        return why_not(fetcher, asked)

    monkeypatch.setattr(DiskTier, "load", slow_load)
    monkeypatch.setattr(Fetcher, "_why_not", note_refusal)
    tape.rounds.append([jobs(small, (name, 8), template=head_of(name, steps=8)) for name in order])
    denoiser.run()
    assert found(tape) == {"t": "disk", "u": "disk"}
    assert len(tape.of(wire.Denoised)) == 2


def together(*groups: tuple[wire.Message, list[wire.Frame]]) -> tuple[wire.Message, list[wire.Frame]]:
    """One group of the jobs of several."""
    denoising = [job for message, _ in groups if isinstance(message, wire.Denoise) for job in message.jobs]
    return wire.Denoise(tuple(denoising)), [frame for _, frames in groups for frame in frames]


@pytest.mark.parametrize(
    ("steps", "fails_dense", "tier"),
    [(4, False, "disk"), (8, False, None), (8, True, None)],
    ids=["as large", "too large", "too large and needed"],
)
def test_jobs_of_a_group_whose_templates_find_no_room_together_run_apart(
    small: Model, tmp_path: Path, steps: int, fails_dense: bool, tier: str | None
) -> None:
    """Memory holds one template of four steps. While a job of `t` runs, a group arrives: a job of `t`, which has its
    template at once, and one of `u`, which waits for room, or for which there will never be any."""
    register_on_disk(small, tmp_path, "t")
    register_on_disk(small, tmp_path, "u", steps=steps)
    [num_bytes] = [status.num_bytes for status in memory_status(small, tmp_path, "t")]
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=num_bytes)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    other = with_terms(jobs(small, ("c", steps), template=head_of("u", steps=steps)), fails_dense=fails_dense)
    group = together(jobs(small, ("b", 4), template=head_of("t")), other)

    def feed(message: wire.Message) -> None:
        if isinstance(message, wire.Joined) and message.jobs[0].id == "a":
            tape.rounds.append([group])

    on_sent(tape, feed)
    denoiser.run()
    assert [message.id for message in tape.of(wire.Denoised)] == (["a", "b"] if fails_dense else ["a", "b", "c"])
    assert [(message.id, message.kind) for message in tape.of(wire.JobFailed)] == [("c", "no_reuse")] * fails_dense
    assert found(tape) == {"a": "disk", "b": "host"} | ({} if fails_dense else {"c": tier})


def test_a_job_that_waits_for_a_template_takes_no_room_of_its_own(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds one template, and the rows of blocks of one job. While the first job of `t` runs, one of `u` waits
    for memory, and behind it another one of `t` has its template and waits for room."""
    changed = choose_by_blocks(small, monkeypatch)
    register_on_disk(small, tmp_path, "t", "u")
    [num_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t", "u")}
    own_bytes = changed.bytes_of(prepare(make_edit(size=SIZE), small))
    config = make_config(disk=str(tmp_path), host_bytes=num_bytes, own_bytes=own_bytes)
    denoiser, tape = denoiser_of(replace(config, reuse_changed=0.6), small)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    waiting = [jobs(small, ("b", 4), template=head_of("u")), jobs(small, ("c", 4), template=head_of("t"))]

    def feed(message: wire.Message) -> None:
        if isinstance(message, wire.Joined) and message.jobs[0].id == "a":
            tape.rounds.append(waiting)
        if isinstance(message, wire.BatchStepped):
            denoiser.templates.fetcher._pinner.submit(lambda: None).result()

    on_sent(tape, feed)
    denoiser.run()
    assert sorted(message.id for message in tape.of(wire.Denoised)) == ["a", "b", "c"]
    assert None not in found(tape).values()


def test_a_busy_worker_registers_too(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job runs until the end, so that there is no idle moment before."""
    monkeypatch.setattr("instgenie.workers.registrar.MAX_STEPS_WAITED", 5)
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([jobs(small, ("a", 20)), registering(small, "t", steps=8)])
    denoiser.run()
    kinds = [type(message) for message, _ in tape.sent if isinstance(message, wire.Registered | wire.BatchStepped)]
    assert kinds.index(wire.Registered) == 5
    assert denoiser.num_interruptions >= 1
    assert [message.num_registered_steps for message in tape.of(wire.Registered)] == [4, 8]


def test_overdue_registrations_leave_most_of_the_time_to_the_jobs(small: Model) -> None:
    denoiser, _ = make_denoiser(small)
    registrar = denoiser.registrar
    for name in "tu":
        registrar.accept(*registering(small, name, steps=8))
    for _ in range(MAX_STEPS_WAITED):
        assert registrar.next(is_idle=False) is None
        registrar.stepped(1.0)
    overdue = registrar.next(is_idle=False)
    assert overdue is registrar.pending[head_of("t", steps=8).id]
    registrar.advance(overdue)
    registrar._span_seconds = 5.0
    for _ in range(20):
        assert registrar.next(is_idle=False) is None
        assert registrar.next(is_idle=True) is overdue
        registrar.stepped(1.0)
    assert registrar.next(is_idle=False) is overdue


def test_a_group_of_long_jobs_leaves_room_for_others(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instgenie.scheduling.scheduler.LONG", 5)
    denoiser, tape = make_denoiser(small)
    denoiser.costs = SHARED
    tape.rounds.extend([[jobs(small, ("a", 9), ("b", 9))], [jobs(small, ("c", 2))], [jobs(small, ("d", 2))], []])
    denoiser.run()
    assert batches(tape)[:6] == ["a", "ac", "ac", "ad", "ad", "ab"]  # `a` is no longer long, so that `b` joins
    assert [message.id for message in tape.of(wire.Denoised)] == ["c", "d", "a", "b"]

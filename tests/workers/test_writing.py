"""A worker whose remote store is slow or away: steps go on, and pictures are read and templates deleted meanwhile."""

import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.workers import files, head_of, jobs, make_denoiser, memory_status, register_on_disk, registering

from instgenie.cache.remote import RemoteTier
from instgenie.cluster import wire
from instgenie.machine.backoff import GoneError
from instgenie.models.model import Model
from instgenie.workers.denoise import Denoiser


def remote_of(denoiser: Denoiser) -> RemoteTier:
    assert denoiser.templates.store.remote
    return denoiser.templates.store.remote


def block(remote: RemoteTier) -> threading.Event:
    """Let no upload end before the returned event is set."""
    may_end, pipe = threading.Event(), remote._files.pipe_file
    remote._server.patience = 60.0

    def pipe_file(path: str, data: bytes) -> None:
        assert may_end.wait(60)
        pipe(path, data)

    remote._files.pipe_file = pipe_file
    return may_end


def test_steps_go_on_while_an_upload_blocks(small: Model, tmp_path: Path) -> None:
    """Memory has room for one template, which cannot leave it: the other waits, and edits do not."""
    register_on_disk(small, tmp_path / "disk", "other")
    [status] = memory_status(small, tmp_path / "disk", "other")
    denoiser, tape = make_denoiser(small, remote=(tmp_path / "remote").as_uri(), host_bytes=status.num_bytes)
    may_end = block(remote_of(denoiser))
    tape.rounds.append([registering(small, "t")])
    meanwhile = [registering(small, "u", urgent=True), jobs(small, ("a", 3))]
    meanwhile += [(wire.Recall(head_of("t")), []), (wire.Forget(head_of("v")), [])]
    answers: list[bool] = []

    def is_busy() -> bool:
        """Play on when the first template is registered, and unblock the upload when all else is answered."""
        if tape.of(wire.Registered) and meanwhile:
            tape.rounds.append([*meanwhile])
            tape.woken.set()
            meanwhile.clear()
        if tape.of(wire.Denoised) and tape.of(wire.Recalled) and tape.of(wire.Forgotten):
            answers.append(may_end.is_set())
            may_end.set()
        return bool(denoiser.queue.groups or denoiser.registrar.pending or not answers)

    tape.is_busy = is_busy
    denoiser.run()
    assert answers[0] is False, "everything was answered while the upload was blocked"
    assert [message.size is not None for message in tape.of(wire.Recalled)] == [True]
    assert tape.of(wire.JobFailed) == []
    done = [one.id for one in tape.of(wire.Registered) if one.num_registered_steps == one.num_steps]
    assert done == [head_of("t").id, head_of("u").id]
    assert len(files(tmp_path / "remote")) == 2, "the end of the process waits for the uploads"


def test_a_process_that_ends_gives_signs_of_life_while_it_writes(small: Model, tmp_path: Path) -> None:
    denoiser, tape = make_denoiser(small, remote=(tmp_path / "remote").as_uri())
    may_end = block(remote_of(denoiser))
    tape.rounds.append([registering(small, "t")])
    num_beats, receive = 0, tape.receive

    def beat(wait: bool) -> Any:
        nonlocal num_beats
        if denoiser.is_stopped:
            num_beats += 1
            if num_beats == 3:
                may_end.set()
        return receive(wait)

    tape.receive = beat  # type: ignore[method-assign]
    denoiser.run()
    assert num_beats >= 3
    assert len(files(tmp_path / "remote")) == 1


def test_a_deletion_that_a_tier_does_not_hear_of_is_reported(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next process lists the template as one to delete, not as one to use."""
    places = {"disk": str(tmp_path / "disk"), "remote": (tmp_path / "remote").as_uri()}
    denoiser, tape = make_denoiser(small, **places)
    tape.rounds.append([registering(small, "t")])
    tape.is_busy = lambda: denoiser.registrar.pending or len(files(tmp_path / "remote")) < 1
    denoiser.run()

    def ask(*_: object) -> None:
        raise GoneError("nobody answers")

    denoiser, tape = make_denoiser(small, **places)
    monkeypatch.setattr(remote_of(denoiser)._server, "ask", ask)
    tape.rounds.append([(wire.Forget(head_of("t")), [])])
    tape.is_busy = lambda: not tape.of(wire.Forgotten)
    denoiser.run()
    assert tape.of(wire.Forgotten) == [wire.Forgotten(head_of("t").id, ("remote",))]
    assert len(files(tmp_path / "remote")) == 1

    denoiser, tape = make_denoiser(small, **places)
    tape.rounds.append([(wire.List("these"), [])])
    tape.is_busy = lambda: not tape.of(wire.Listed)
    denoiser.run()
    assert tape.of(wire.Listed) == [wire.Listed("these", (), (head_of("t"),))]

    denoiser, tape = make_denoiser(small, **places)
    tape.rounds.append([(wire.Forget(head_of("t")), [])])
    tape.is_busy = lambda: not tape.of(wire.Forgotten)
    denoiser.run()
    assert tape.of(wire.Forgotten) == [wire.Forgotten(head_of("t").id, ())]
    assert files(tmp_path / "remote") == []


def test_expired_templates_are_reported(small: Model, tmp_path: Path) -> None:
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), seconds_to_live=1e-6)
    tape.rounds.append([registering(small, "t")])

    def is_reported() -> bool:
        kept = [message for message in tape.of(wire.Kept) if message.template == head_of("t").id]
        return bool(kept) and kept[-1].template_bytes == {}

    tape.is_busy = lambda: not is_reported()
    denoiser.run()
    assert files(tmp_path) == []

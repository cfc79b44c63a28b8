"""The inbox of a process that does one task after the other."""

import threading
from typing import Any

import pytest
from helpers.edits import make_edit
from helpers.workers import Tape

from instgenie.cluster import wire
from instgenie.cluster.wish import Wish
from instgenie.models.model import Model
from instgenie.workers import finish as finishing
from instgenie.workers.finish import ThreadedFinisher
from instgenie.workers.inbox import Inbox
from instgenie.workers.prepare import Preparer, run

SIZE = (32, 48)


def to_prepare(name: str) -> tuple[wire.Message, list[wire.Frame]]:
    edit = make_edit(size=SIZE)
    message = wire.Prepare(name, 1, Wish(prompt="cat", seed=1, steps=2), SIZE)
    return message, wire.picture_frames(edit.picture, edit.mask)


def template_to_prepare(name: str) -> tuple[wire.Message, list[wire.Frame]]:
    return wire.PrepareTemplate(name, 1, 2, 0.0, SIZE), wire.picture_frames(make_edit(size=SIZE).picture)


def make_inbox(*heard: tuple[wire.Message, list[wire.Frame]]) -> tuple[Inbox, Tape]:
    tape = Tape()
    tape.rounds.append(list(heard))
    return Inbox(tape), tape  # type: ignore[arg-type]


def test_cancelled_edits_are_not_prepared(models: dict[str, Model]) -> None:
    heard = [to_prepare(str(index)) for index in range(5)]
    heard += [(wire.Cancel(str(index)), []) for index in range(4)]
    inbox, tape = make_inbox(*heard)
    run(Preparer(models["sd"], tape), inbox)  # type: ignore[arg-type]
    assert [message.id for message in tape.of(wire.Prepared)] == ["4"]
    assert [message.id for message in tape.of(wire.Dropped)] == ["0", "1", "2", "3"]


def test_edits_go_before_templates(models: dict[str, Model]) -> None:
    inbox, tape = make_inbox(template_to_prepare("t"), to_prepare("a"), template_to_prepare("u"), to_prepare("b"))
    tape.rounds[0].append((wire.Cancel("u"), []))
    run(Preparer(models["sd"], tape), inbox)  # type: ignore[arg-type]
    assert [message.id for message in tape.of(wire.Prepared)] == ["a", "b", "t"]


def test_a_cancelled_picture_is_not_encoded(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, begun = threading.Event(), []

    def encode(message: wire.Finish, frames: Any, decoded: Any) -> tuple[bytes, float]:
        begun.append(message.id)
        assert may_go_on.wait(60)
        return b"png", 0.0

    monkeypatch.setattr(finishing, "encode", encode)
    monkeypatch.setattr(finishing, "NUM_ENCODERS", 1)
    tape = Tape()
    finisher = ThreadedFinisher(models["sd"], tape)  # type: ignore[arg-type]
    monkeypatch.setattr(finisher, "decode", lambda message, frames: lambda: encode(message, frames, None))
    for name in ("a", "b", "c"):
        head = wire.TensorHead("float32", (1,))
        finisher.handle(wire.Finish(name, 1, head, (1, 1), SIZE, 0, "png", 100, None), [])
    finisher.cancel("b")
    may_go_on.set()
    finisher.close()
    assert begun == ["a", "c"]
    assert [message.id for message in tape.of(wire.Painted)] == ["a", "c"]

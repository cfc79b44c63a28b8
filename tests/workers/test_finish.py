"""The finish process: pictures are decoded one by one, encoded by threads, and leave in order."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from helpers.edits import make_edit

from instgenie.cluster import wire
from instgenie.engine.finish import finish
from instgenie.engine.prepare import prepare
from instgenie.models.model import Model
from instgenie.pictures.picture import encode_picture, open_picture
from instgenie.workers import finish as worker
from instgenie.workers.finish import Finisher, ThreadedFinisher, run
from instgenie.workers.frames import tensor_frame, tensor_head

SIZE = (64, 64)
Break = Callable[[list[wire.Frame]], list[wire.Frame]]


class Tape:
    """Plays messages, and records those that are sent."""

    def __init__(self, *heard: tuple[wire.Message, list[wire.Frame]]) -> None:
        self.heard = list(heard)
        self.sent: list[tuple[wire.Message, list[wire.Frame]]] = []
        self.woken = threading.Semaphore(0)

    def send(self, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        self.sent.append((message, list(frames)))

    def receive(self, wait: bool) -> tuple[wire.Message, list[wire.Frame]]:
        return self.heard.pop(0)

    def wake(self) -> None:
        self.woken.release()


@pytest.fixture
def line() -> Tape:
    return Tape()


def to_finish(model: Model, name: str, file_format: str = "png") -> tuple[wire.Finish, list[wire.Frame]]:
    edit = make_edit(size=SIZE)
    job = prepare(edit, model)
    message = wire.Finish(name, 1, tensor_head(job.latents), job.grid, SIZE, 0, file_format, 100, None)
    return message, [tensor_frame(job.latents), *wire.picture_frames(edit.picture, edit.mask)]


@pytest.mark.parametrize("kind", [Finisher, ThreadedFinisher])
def test_pictures_equal_those_of_the_engine(models: dict[str, Model], line: Tape, kind: type[Finisher]) -> None:
    model = models["sd"]
    finisher = kind(model, line)  # type: ignore[arg-type]
    finisher.handle(*to_finish(model, "a"))
    finisher.close()
    [(painted, [encoded])] = line.sent
    assert isinstance(painted, wire.Painted)
    assert painted.seconds > 0
    assert (painted.thread_seconds > 0) == (kind is ThreadedFinisher)
    job = prepare(make_edit(size=SIZE), model)
    assert np.array_equal(open_picture(bytes(encoded)), finish(job, model))


def test_pictures_leave_in_the_order_they_came(
    models: dict[str, Model], line: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is encoded last; the loop is woken, and nothing is sent before it."""
    finisher, may_go_on = ThreadedFinisher(models["sd"], line), threading.Event()  # type: ignore[arg-type]

    def encode(picture: np.ndarray, file_format: str, *rest: object, **named: object) -> bytes:
        if file_format == "webp":
            assert may_go_on.wait(30)
        return encode_picture(picture, file_format)

    monkeypatch.setattr(worker, "encode_picture", encode)
    finisher.handle(*to_finish(models["sd"], "a", "webp"))
    finisher.handle(*to_finish(models["sd"], "b"))
    assert line.woken.acquire(timeout=30)
    finisher.send_done()
    assert not line.sent
    may_go_on.set()
    assert line.woken.acquire(timeout=30)
    finisher.send_done()
    assert [message.id for message, _ in line.sent] == ["a", "b"]  # type: ignore[union-attr]


def broken_frame(frames: list[wire.Frame]) -> list[wire.Frame]:
    return [frames[0][:-4], *frames[1:]]


def broken_picture(frames: list[wire.Frame]) -> list[wire.Frame]:
    return [frames[0], frames[1][:-1], frames[2]]


@pytest.mark.parametrize("kind", [Finisher, ThreadedFinisher])
@pytest.mark.parametrize("breaks", [broken_frame, broken_picture])
def test_a_picture_that_cannot_be_finished_fails_alone(
    models: dict[str, Model], line: Tape, breaks: Break, kind: type[Finisher]
) -> None:
    """An error while decoding or while encoding fails only its own picture."""
    finisher = kind(models["sd"], line)  # type: ignore[arg-type]
    message, frames = to_finish(models["sd"], "a")
    finisher.handle(message, breaks(frames))
    finisher.handle(*to_finish(models["sd"], "b"))
    finisher.close()
    assert [type(message) for message, _ in line.sent] == [wire.JobFailed, wire.Painted]


@pytest.mark.parametrize("kind", [Finisher, ThreadedFinisher])
def test_a_finisher_that_is_stopped_finishes_what_it_has(models: dict[str, Model], kind: type[Finisher]) -> None:
    model = models["sd"]
    line = Tape(to_finish(model, "a"), to_finish(model, "b"), (wire.Stop(), []))
    run(kind(model, line))  # type: ignore[arg-type]
    assert [message.id for message, _ in line.sent] == ["a", "b"]  # type: ignore[union-attr]

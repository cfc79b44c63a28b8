"""The finish process: pictures are decoded one by one, encoded by threads, and leave in order."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import make_edit

from instgenie import wire
from instgenie.engine.finish import finish
from instgenie.engine.frames import tensor_frame, tensor_head
from instgenie.engine.prepare import prepare
from instgenie.models.model import Model
from instgenie.picture import encode_picture, open_picture
from instgenie.workers import finish as worker
from instgenie.workers.finish import Finisher, Pipeline

SIZE = (64, 64)


class Tape:
    def __init__(self) -> None:
        self.sent: list[tuple[wire.Message, list[wire.Frame]]] = []
        self.woken = threading.Semaphore(0)

    def send(self, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        self.sent.append((message, list(frames)))

    def wake(self) -> None:
        self.woken.release()


@pytest.fixture
def line() -> Tape:
    return Tape()


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


def make_pipeline(model: Model, line: Tape, pool: ThreadPoolExecutor) -> Pipeline:
    return Pipeline(Finisher(model, line), pool)  # type: ignore[arg-type]


def to_finish(model: Model, name: str, file_format: str = "png") -> tuple[wire.Finish, list[wire.Frame]]:
    edit = make_edit(size=SIZE)
    job = prepare(edit, model)
    message = wire.Finish(name, 1, tensor_head(job.latents), job.grid, SIZE, 0, file_format, 100, None)
    return message, [tensor_frame(job.latents), *wire.picture_frames(edit.picture, edit.mask)]


@pytest.mark.parametrize("together", [False, True])
def test_a_picture_is_what_finishing_makes_of_it(
    models: dict[str, Model], line: Tape, pool: ThreadPoolExecutor, together: bool
) -> None:
    model = models["sd"]
    message, frames = to_finish(model, "a")
    if together:
        Finisher(model, line).handle(message, frames)  # type: ignore[arg-type]
    else:
        pipeline = make_pipeline(model, line, pool)
        pipeline.take(message, frames)
        pipeline.send(wait=True)
    [(painted, [encoded])] = line.sent
    assert isinstance(painted, wire.Painted)
    assert painted.seconds > 0
    assert (painted.thread_seconds > 0) != together
    job = prepare(make_edit(size=SIZE), model)
    assert np.array_equal(open_picture(bytes(encoded)), finish(job, model))


def test_pictures_leave_in_the_order_they_came(
    models: dict[str, Model], line: Tape, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is encoded last; the loop is woken, and nothing is sent before it."""
    pipeline, may_go_on = make_pipeline(models["sd"], line, pool), threading.Event()

    def encode(picture: np.ndarray, file_format: str, *rest: object, **named: object) -> bytes:
        if file_format == "webp":
            assert may_go_on.wait(30)
        return encode_picture(picture, file_format)

    monkeypatch.setattr(worker, "encode_picture", encode)
    pipeline.take(*to_finish(models["sd"], "a", "webp"))
    pipeline.take(*to_finish(models["sd"], "b"))
    assert line.woken.acquire(timeout=30)
    pipeline.send()
    assert not line.sent
    may_go_on.set()
    pipeline.send(wait=True)
    assert [message.id for message, _ in line.sent] == ["a", "b"]  # type: ignore[union-attr]


def broken_frame(frames: list[wire.Frame]) -> list[wire.Frame]:
    return [frames[0][:-4], *frames[1:]]


def broken_picture(frames: list[wire.Frame]) -> list[wire.Frame]:
    return [frames[0], frames[1][:-1], frames[2]]


@pytest.mark.parametrize("breaks", [broken_frame, broken_picture])
def test_what_cannot_be_finished_fails_alone(
    models: dict[str, Model],
    line: Tape,
    pool: ThreadPoolExecutor,
    breaks: Callable[[list[wire.Frame]], list[wire.Frame]],
) -> None:
    """Whether the device or a thread finds out."""
    pipeline = make_pipeline(models["sd"], line, pool)
    message, frames = to_finish(models["sd"], "a")
    pipeline.take(message, breaks(frames))
    pipeline.take(*to_finish(models["sd"], "b"))
    pipeline.send(wait=True)
    assert [type(message) for message, _ in line.sent] == [wire.Failed, wire.Painted]

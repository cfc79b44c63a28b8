"""Workers of one process: side tasks between static batches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers.edits import make_edit
from helpers.workers import SIZE, Tape

from instgenie.cluster import wire
from instgenie.cluster.config import ProcessConfig, ResolvedCache
from instgenie.cluster.wish import Wish
from instgenie.models.model import Model
from instgenie.workers.denoise import Denoiser
from instgenie.workers.frames import tensor_frame, tensor_head


class Echo(Tape):
    """Plays the cluster: prepared edits come back to be denoised, denoised ones to be finished. Records the work."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.grids: dict[str, tuple[int, int]] = {}
        self.on_step: Callable[[], None] = lambda: None
        self.is_awaited: Callable[[], Any] = lambda: False  # True while the loop expects edits to come back

    def receive(self, wait: bool) -> tuple[wire.Message, list[wire.Frame]] | None:
        return None if not self.rounds and self.is_awaited() else super().receive(wait)

    def send(self, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        super().send(message, frames)
        own: list[wire.Frame] = [bytes(frame) for frame in frames]
        match message:
            case wire.Prepared():
                self.done.append(f"prepare {message.id}")
                self.grids[message.id] = message.job.grid
                denoising = wire.Denoising(message.id, 1, message.job, None, True, 0)
                self.rounds.append([(wire.Denoise((denoising,)), own)])
            case wire.BatchStepped():
                self.done.append("step " + "".join(job.id for job in message.jobs))
                self.on_step()
            case wire.Denoised():
                self.rounds.append([self.to_finish(message.id, message.latents, own)])
            case wire.Painted():
                self.done.append(f"finish {message.id}")

    def to_finish(
        self, name: str, latents: wire.TensorHead, frames: list[wire.Frame], partial: int | None = None
    ) -> tuple[wire.Message, list[wire.Frame]]:
        edit = make_edit(size=SIZE)
        message = wire.Finish(name, 1, latents, self.grids[name], edit.picture.shape[:2], 0, "png", 100, partial)
        return message, [*frames, *wire.picture_frames(edit.picture, edit.mask)]


def to_prepare(name: str, steps: int = 1) -> tuple[wire.Message, list[wire.Frame]]:
    edit = make_edit(size=SIZE)
    message = wire.Prepare(name, 1, Wish("a cat", 0, steps=steps), edit.picture.shape[:2])
    return message, wire.picture_frames(edit.picture, edit.mask)


@pytest.fixture
def unet(models: dict[str, Model]) -> Model:
    """Its own size, which workers prepare for, is small."""
    return models["sd"]


def make_static(model: Model) -> tuple[Denoiser, Echo]:
    """Two jobs are a batch."""
    tape = Echo()
    config = ProcessConfig("a", "", "", "cpu", "auto", 2, "static", ResolvedCache(host_bytes=2**30))
    denoiser = Denoiser(config, model, tape)  # type: ignore[arg-type]
    tape.is_awaited = lambda: denoiser.side_work.away
    return denoiser, tape


def test_a_static_worker_finishes_first_then_prepares_a_batch(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    tape.rounds.append([to_prepare(name, steps) for name, steps in (("a", 2), ("b", 1), ("c", 1))])
    denoiser.run()
    first = ["prepare a", "prepare b", "step ab", "step a", "finish b", "finish a"]
    assert tape.done == [*first, "prepare c", "step c", "finish c"]
    assert denoiser.num_interruptions == 0


def test_tasks_wait_for_the_end_of_a_static_batch_except_partial_pictures(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    tape.rounds.append([to_prepare("a", 4)])

    def preview() -> tuple[wire.Message, list[wire.Frame]]:
        [job] = denoiser.engine.jobs
        return tape.to_finish("a", tensor_head(job.latents), [tensor_frame(job.latents)], partial=0)

    coming = [lambda: [to_prepare("b")], lambda: [preview()], lambda: [to_prepare("c"), (wire.Cancel("c"), [])]]
    tape.on_step = lambda: tape.rounds.append(coming.pop(0)()) if coming else None
    denoiser.run()
    assert tape.done == [
        "prepare a", "step a", "step a", "finish a", "step a", "step a", "finish a", "prepare b", "step b", "finish b",
    ]  # fmt: skip


def test_a_static_worker_prepares_templates_when_no_edit_waits(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    pixels = make_edit(size=SIZE).picture
    asked = wire.PrepareTemplate("t", 1, 2, 3.5, pixels.shape[:2]), wire.picture_frames(pixels)
    tape.rounds.append([asked, to_prepare("a"), to_prepare("b")])
    denoiser.run()
    assert tape.done[:5] == ["prepare a", "prepare b", "step ab", "finish a", "finish b"]
    assert tape.done[5] == "prepare t"


def test_a_static_worker_does_not_wait_long_for_edits_that_are_away(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    bad, frames = to_prepare("bad")
    tape.rounds.append([(bad, frames[:1]), to_prepare("a")])
    denoiser.side_work.away.add("gone")
    denoiser.run()
    assert tape.done == ["prepare a", "step a", "finish a"]
    assert [failed.id for failed in tape.of(wire.JobFailed)] == ["bad"]


def test_a_static_worker_that_is_stopped_prepares_no_more(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    tape.rounds.append([to_prepare("a"), to_prepare("b"), (wire.Stop(), [])])
    denoiser.run()
    assert tape.done == []

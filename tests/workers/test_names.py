"""Log lines of a worker's processes about work that failed name its request and its job."""

from typing import Any

import pytest
from helpers.workers import Tape, head_of, jobs, make_denoiser, registering

from instgenie.cluster import wire
from instgenie.cluster.wish import Wish
from instgenie.models.model import Model
from instgenie.workers.finish import Finisher
from instgenie.workers.prepare import Preparer

BROKEN = [b"not a tensor"]
NAMES = {"request_id": "the request"}


def names(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.__dict__["job"], record.__dict__["request_id"]) for record in caplog.records]


def test_failures_of_prepare_and_finish(small: Model, caplog: pytest.LogCaptureFixture) -> None:
    tape: Any = Tape()
    wish = Wish(prompt="a cat", seed=0)
    Preparer(small, tape).handle(wire.Prepare("one", 1, wish, (16, 16), **NAMES), BROKEN)
    Preparer(small, tape).handle(wire.PrepareTemplate("two", 1, 4, 1.0, (16, 16), **NAMES), BROKEN)
    latents = wire.TensorHead("float32", (4, 4))
    Finisher(small, tape).handle(wire.Finish("three", 1, latents, (1, 1), (16, 16), 0, "png", 1, None, **NAMES), BROKEN)
    assert names(caplog) == [(job, "the request") for job in ("one", "two", "three")]
    assert [message.id for message in tape.of(wire.JobFailed)] == ["one", "two", "three"]


def test_failures_of_denoise(small: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot be read, one that fails at a step, and a registration."""
    denoiser, tape = make_denoiser(small)
    message, frames = jobs(small, ("read", 2), ("step", 2))
    assert isinstance(message, wire.Denoise)
    named = [wire.Denoising(**fields(one) | NAMES) for one in message.jobs]
    num_frames = len(frames) // 2
    template, tensors = registering(small, "picture")
    assert isinstance(template, wire.Register)
    tape.rounds.append(
        [
            (wire.Denoise((named[0],)), BROKEN * num_frames),
            (wire.Denoise((named[1],)), frames[num_frames:]),
            (wire.Register(**fields(template) | NAMES), BROKEN * len(tensors)),
        ]
    )

    def fail(jobs: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(denoiser.engine, "predict", fail)
    denoiser.run()
    assert names(caplog) == [(job, "the request") for job in ("read", head_of("picture").id, "step")]


def fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}

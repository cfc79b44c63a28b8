"""The step loop of a worker, in this process, with a line that only records."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import make_edit

from instgenie import wire
from instgenie.config import Batching, CacheConfig, ProcessConfig
from instgenie.engine.frames import job_frames, read_tensor
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import edit_of_nothing, register, reuse, template_job
from instgenie.models.model import Model
from instgenie.workers.denoise import Denoiser, partial_steps

SIZE = (32, 48)


class Tape:
    """Hands out what the test has recorded, one round of the loop after the other, then stops the loop."""

    def __init__(self) -> None:
        self.rounds: deque[list[tuple[wire.Message, list[wire.Frame]]]] = deque()
        self.sent: list[tuple[Any, Sequence[wire.Frame]]] = []
        self.woken = threading.Event()
        self.is_busy: Callable[[], Any] = lambda: False  # whether something is yet to come of threads

    def send(self, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        self.sent.append((message, [bytes(frame) for frame in frames]))

    def receive(self, wait: bool) -> tuple[wire.Message, list[wire.Frame]] | None:
        if self.rounds and self.rounds[0]:
            return self.rounds[0].pop(0)
        if self.rounds:
            self.rounds.popleft()
            return None
        if wait and self.is_busy():
            assert self.woken.wait(60)
            self.woken.clear()
            return None
        return (wire.Stop(), []) if wait else None

    def wake(self) -> None:
        self.woken.set()

    def of(self, kind: type) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


@pytest.fixture
def small(models: dict[str, Model]) -> Model:
    return models["blend"]


def make_denoiser(model: Model, batching: Batching = "continuous", **cache: Any) -> tuple[Denoiser, Tape]:
    config = ProcessConfig("a", "denoise", 0, "", "", "cpu", "auto", 2, batching, CacheConfig(**cache))
    tape = Tape()
    denoiser = Denoiser(config, model, tape)  # type: ignore[arg-type]
    tape.is_busy = lambda: denoiser.waiting or denoiser.registering
    return denoiser, tape


def head_of(name: str, tenant: str = "me", weights: str = "these") -> wire.TemplateHead:
    return wire.TemplateHead(name, tenant, weights, SIZE, 4, 3.5)


def jobs(
    model: Model, *steps: tuple[str, int], template: wire.TemplateHead | None = None, is_sure: bool = True
) -> tuple[wire.Message, list[wire.Frame]]:
    """One group of jobs, each a name and a number of steps."""
    made = [(name, job_frames(prepare(make_edit(size=SIZE, steps=num), model))) for name, num in steps]
    message = wire.Denoise(tuple(wire.Denoising(name, 1, head, template, is_sure, 0) for name, (head, _) in made))
    return message, [frame for _, (_, frames) in made for frame in frames]


def template(model: Model, name: str, urgent: bool = False) -> tuple[wire.Message, list[wire.Frame]]:
    head, frames = job_frames(template_job(edit_of_nothing(make_edit(size=SIZE).picture, model, SIZE, 4, None), model))
    return wire.Register(name, 1, head_of(name), head, urgent), frames


def batches(tape: Tape) -> list[str]:
    return ["".join(job.id for job in step.jobs) for step in tape.of(wire.Stepped)]


def test_jobs_join_and_leave_at_every_step(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.extend([[jobs(small, ("a", 4))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "ab", "ac"]
    assert [message.id for message in tape.of(wire.Denoised)] == ["b", "a", "c"]


def test_static_batches_end_before_the_next_begins(small: Model) -> None:
    denoiser, tape = make_denoiser(small, "static")
    tape.rounds.extend([[jobs(small, ("a", 3))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "a", "bc", "b"]


def test_a_group_joins_whole_and_nobody_overtakes_it(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    group = jobs(small, ("b", 1), ("c", 1))
    tape.rounds.extend([[jobs(small, ("a", 2)), group, jobs(small, ("d", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "bc", "d"]


def test_a_group_larger_than_a_batch_goes_alone(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([jobs(small, ("a", 1), ("b", 2), ("c", 1)), jobs(small, ("d", 1))])
    denoiser.run()
    assert batches(tape) == ["ab", "bc", "d"]


def test_a_template_waits_for_an_idle_moment(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([template(small, "t"), jobs(small, ("a", 2))])
    denoiser.run()
    kinds = [type(message) for message, _ in tape.sent]
    assert kinds.index(wire.Denoised) < kinds.index(wire.Registered)
    assert denoiser.num_interruptions == 0
    assert tape.of(wire.Registered)[-1].num_registered_steps == 4


def test_an_urgent_template_does_not_wait(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([template(small, "t", urgent=True), jobs(small, ("a", 3))])
    denoiser.run()
    kinds = [type(message) for message, _ in tape.sent]
    assert kinds.index(wire.Denoised) > kinds.index(wire.Registered)
    assert denoiser.num_interruptions == 1


def test_a_job_uses_what_was_registered(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    job = jobs(small, ("a", 4), template=head_of("t"))
    tape.rounds.extend([[job], [template(small, "t")], [], [job]])
    denoiser.run()
    assert tape.of(wire.Missing) == [wire.Missing("a", 1, "t")]
    [(message, [frame])] = [sent for sent in tape.sent if isinstance(sent[0], wire.Denoised)]
    edit = make_edit(size=SIZE, steps=4)
    expected = reuse(prepare(edit, small), register(edit.picture, small, SIZE, 4, None))
    engine = Engine(small)
    engine.join(expected)
    while engine.jobs:
        engine.step()
    assert torch.equal(read_tensor(message.latents, frame), expected.latents)
    assert message.num_computed_tokens == expected.num_computed_tokens


def test_a_newer_attempt_takes_the_place_of_an_older(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    message, frames = jobs(small, ("a", 3))
    assert isinstance(message, wire.Denoise)
    [job] = message.jobs
    again = wire.Denoise((wire.Denoising("a", 2, job.job, None, False, 0),))
    tape.rounds.extend([[(message, frames)], [(again, frames)], []])
    denoiser.run()
    assert [(done.id, done.attempt) for done in tape.of(wire.Denoised)] == [("a", 2)]


def test_a_template_larger_than_the_budget_fails(small: Model) -> None:
    denoiser, tape = make_denoiser(small, host_bytes=1000)
    tape.rounds.append([template(small, "t")])
    denoiser.run()
    [failed] = tape.of(wire.Failed)
    assert (failed.id, failed.kind) == ("t", "out_of_memory")


def test_partial_pictures_are_spread_over_the_steps() -> None:
    assert partial_steps(28, 3) == (7, 14, 21)
    assert partial_steps(4, 1) == (2,)
    assert partial_steps(2, 3) == (1,)
    assert partial_steps(1, 3) == ()
    assert partial_steps(10, 0) == ()

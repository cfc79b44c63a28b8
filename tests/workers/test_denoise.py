"""The step loop of a worker, in this process, with a line that only records."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import make_edit

from instgenie.cache.disk import DiskTier
from instgenie.cluster import wire
from instgenie.cluster.config import CacheConfig, ProcessConfig
from instgenie.cluster.wish import Wish
from instgenie.cost.table import line_costs
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.engine.register import edit_of_nothing, register, reuse, template_job
from instgenie.jobs.activations import Key, Span
from instgenie.models.model import Model
from instgenie.scheduling.names import Batching
from instgenie.workers.denoise import Denoiser, partial_steps
from instgenie.workers.frames import job_frames, read_tensor, tensor_frame, tensor_head

SIZE = (32, 48)
SHARED = line_costs(per_step=1.0, per_token=0.0)  # a step takes as long, however many jobs share it


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
    kept = CacheConfig(**{"host_bytes": 2**30} | cache)
    config = ProcessConfig("a", "denoise", 0, "", "", "cpu", "auto", 2, batching, kept)
    tape = Tape()
    denoiser = Denoiser(config, model, tape)  # type: ignore[arg-type]
    tape.is_busy = lambda: denoiser.waiting or denoiser.registering
    return denoiser, tape


def head_of(name: str, tenant: str = "me", weights: str = "these", steps: int = 4) -> wire.TemplateHead:
    return wire.TemplateHead(name, tenant, weights, SIZE, steps, 3.5)


def jobs(
    model: Model, *steps: tuple[str, int], template: wire.TemplateHead | None = None, is_sure: bool = True
) -> tuple[wire.Message, list[wire.Frame]]:
    """One group of jobs, each a name and a number of steps."""
    made = [(name, job_frames(prepare(make_edit(size=SIZE, steps=num), model))) for name, num in steps]
    message = wire.Denoise(tuple(wire.Denoising(name, 1, head, template, is_sure, 0) for name, (head, _) in made))
    return message, [frame for _, (_, frames) in made for frame in frames]


def template(model: Model, name: str, urgent: bool = False, steps: int = 4) -> tuple[wire.Message, list[wire.Frame]]:
    edit = edit_of_nothing(make_edit(size=SIZE).picture, model, SIZE, steps, None)
    head, frames = job_frames(template_job(edit, model))
    pixels = make_edit(size=SIZE).picture
    message = wire.Register(name, 1, head_of(name, steps=steps), head, urgent, pixels.shape[:2])
    return message, [*frames, *wire.picture_frames(pixels)]


def register_on_disk(model: Model, folder: Path, *names: str, steps: int = 4) -> list[wire.Registered]:
    """By a process that ends."""
    denoiser, tape = make_denoiser(model, disk=str(folder))
    tape.rounds.append([template(model, name, steps=steps) for name in names])
    denoiser.run()
    registered: list[wire.Registered] = tape.of(wire.Registered)
    return registered


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/0*.safetensors"))


def batches(tape: Tape) -> list[str]:
    return ["".join(job.id for job in step.jobs) for step in tape.of(wire.Stepped)]


def test_jobs_join_and_leave_at_every_step(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = SHARED
    tape.rounds.extend([[jobs(small, ("a", 4))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "ab", "ac"]
    assert [message.id for message in tape.of(wire.Denoised)] == ["b", "a", "c"]


def test_what_steps_cost_is_told_before_any_is_taken(small: Model) -> None:
    """And each step is told beside what it was predicted to take: masked tokens alone where they are cached."""
    denoiser, tape = make_denoiser(small)
    tape.rounds.append([template(small, "t")])
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    tape.rounds.append([jobs(small, ("b", 1))])
    denoiser.run()
    first, _ = tape.sent[0]
    assert isinstance(first, wire.Priced)
    assert wire.decode(wire.encode(first)) == first
    job = prepare(make_edit(size=SIZE, steps=4), small)
    num_tokens, num_masked = len(job.masked), int(job.masked.sum())
    cached, dense = (first.costs.price(num_tokens, num_masked, tier) for tier in ("host", None))
    prices = {"a": cached, "b": dense}
    for step in tape.of(wire.Stepped):
        expected = first.costs.step(prices[told.id] for told in step.jobs)
        assert step.predicted_seconds == pytest.approx(expected), step
    assert cached.compute < dense.compute


def test_static_batches_end_before_the_next_begins(small: Model) -> None:
    denoiser, tape = make_denoiser(small, "static-pipelined")
    tape.rounds.extend([[jobs(small, ("a", 3))], [jobs(small, ("b", 2))], [jobs(small, ("c", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "a", "bc", "b"]


class Echo(Tape):
    """Sends back what was prepared, to be denoised, and what was denoised, to be finished. Takes down what is done."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.grids: dict[str, tuple[int, int]] = {}
        self.on_step: Callable[[], None] = lambda: None
        self.is_awaited: Callable[[], Any] = lambda: False  # whether who hears nothing goes on waiting

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
            case wire.Stepped():
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
    """Its own size is small, and that is what workers prepare for."""
    return models["sd"]


def make_static(model: Model) -> tuple[Denoiser, Echo]:
    """Two jobs are a batch."""
    tape = Echo()
    config = ProcessConfig("a", "denoise", 0, "", "", "cpu", "auto", 2, "static", CacheConfig(host_bytes=2**30))
    denoiser = Denoiser(config, model, tape)  # type: ignore[arg-type]
    tape.is_awaited = lambda: denoiser.chores.away
    return denoiser, tape


def test_a_static_worker_finishes_then_prepares_what_a_batch_takes(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    tape.rounds.append([to_prepare(name, steps) for name, steps in (("a", 2), ("b", 1), ("c", 1))])
    denoiser.run()
    first = ["prepare a", "prepare b", "step ab", "step a", "finish b", "finish a"]
    assert tape.done == [*first, "prepare c", "step c", "finish c"]
    assert denoiser.num_interruptions == 0


def test_what_comes_during_a_static_batch_waits_for_its_end_but_previews(unet: Model) -> None:
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


def test_a_static_worker_prepares_templates_when_nobody_waits(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    pixels = make_edit(size=SIZE).picture
    asked = wire.PrepareTemplate("t", 1, 2, 3.5, pixels.shape[:2]), wire.picture_frames(pixels)
    tape.rounds.append([asked, to_prepare("a"), to_prepare("b")])
    denoiser.run()
    assert tape.done[:5] == ["prepare a", "prepare b", "step ab", "finish a", "finish b"]
    assert tape.done[5] == "prepare t"


def test_what_never_comes_back_is_not_waited_for_long(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    bad, frames = to_prepare("bad")
    tape.rounds.append([(bad, frames[:1]), to_prepare("a")])
    denoiser.chores.away.add("gone")
    denoiser.run()
    assert tape.done == ["prepare a", "step a", "finish a"]
    assert [failed.id for failed in tape.of(wire.Failed)] == ["bad"]


def test_a_static_worker_that_is_stopped_prepares_no_more(unet: Model) -> None:
    denoiser, tape = make_static(unet)
    tape.rounds.append([to_prepare("a"), to_prepare("b"), (wire.Stop(), [])])
    denoiser.run()
    assert tape.done == []


def test_a_group_joins_whole_and_nobody_overtakes_it(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    group = jobs(small, ("b", 1), ("c", 1))
    tape.rounds.extend([[jobs(small, ("a", 2)), group, jobs(small, ("d", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "a", "bc", "d"]


def test_jobs_that_share_nothing_take_turns_unless_one_is_soon_done(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = line_costs(per_step=1e-9, per_token=1.0)
    tape.rounds.extend([[jobs(small, ("a", 4))], [jobs(small, ("b", 1))], [jobs(small, ("c", 2))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "a", "a", "c", "c"]


def test_a_group_does_not_wait_longer_than_it_takes(small: Model) -> None:
    denoiser, tape = make_denoiser(small)
    denoiser.costs = SHARED
    tape.rounds.extend([[jobs(small, ("a", 6)), jobs(small, ("b", 2), ("c", 2)), jobs(small, ("d", 1))], []])
    denoiser.run()
    assert batches(tape) == ["a", "ab", "ab", "ac", "ac", "ad"]


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


def found(tape: Tape) -> dict[str, Any]:
    return {message.id: message.tier for message in tape.of(wire.Found)}


@pytest.mark.parametrize(
    ("head", "tier"),
    [
        (head_of("t"), "disk"),
        (head_of("t", tenant="you"), None),
        (head_of("t", weights="others"), None),
        (head_of("u"), None),
    ],
)
def test_what_another_process_left_on_disk(small: Model, tmp_path: Path, head: wire.TemplateHead, tier: Any) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    tape.rounds.append([jobs(small, ("a", 4), template=head, is_sure=False)])
    denoiser.run()
    assert found(tape) == {"a": tier}
    [denoised] = tape.of(wire.Denoised)
    num_tokens = SIZE[0] * SIZE[1] // small.patch**2
    assert (denoised.num_computed_tokens < num_tokens) == (tier is not None)
    assert denoiser.num_interruptions == 0


def test_where_activations_were_when_the_job_was_queued(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    key = denoiser.find_key(head_of("t"))
    denoiser.foresee(wire.Fetch("a", head_of("t")), [])
    assert denoiser.templates.store.get(key) is not None
    both = [jobs(small, (name, 4), template=head_of("t")) for name in "ab"]
    tape.rounds.append(both)
    denoiser.run()
    assert found(tape) == {"a": "disk", "b": "host"}


class SlowDisk:
    """Loads when it is told to, and counts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.num_loads = 0
        load = DiskTier.load

        def slow_load(tier: DiskTier, key: Key, steps: range) -> Span | None:
            assert self.go.wait(60)
            self.num_loads += 1
            return load(tier, key, steps)

        patch.setattr(DiskTier, "load", slow_load)


def test_who_waits_for_the_disk_holds_up_nobody(small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_on_disk(small, tmp_path, "t")
    disk = SlowDisk(monkeypatch)
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    tape.rounds.append([jobs(small, (name, 4), template=head_of("t")) for name in "ab"])
    tape.rounds.extend([[jobs(small, ("c", 3))], [], [], []])
    hand_over = denoiser.hand_over

    def note(running: Any) -> None:
        disk.go.set()
        hand_over(running)

    denoiser.hand_over = note  # type: ignore[method-assign]
    denoiser.run()
    assert batches(tape) == ["c", "c", "c", "ab", "ab", "ab", "ab"]
    assert found(tape) == {"a": "disk", "b": "disk"}
    assert disk.num_loads == 1  # for both
    assert denoiser.num_interruptions == 0


def test_a_job_waits_for_room(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t", "u")
    [num_bytes] = {tier.num_bytes for tier in measure(small, tmp_path, "t", "u")}
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=num_bytes)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    send = tape.send

    def send_and_queue(message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        send(message, frames)
        if isinstance(message, wire.Joined) and message.jobs[0].id == "a":
            denoiser.templates._pinner.submit(lambda: None).result()
            tape.rounds.append([jobs(small, ("b", 4), template=head_of("u"))])

    tape.send = send_and_queue  # type: ignore[method-assign]
    denoiser.run()
    assert batches(tape) == ["a"] * 4 + ["b"] * 4
    assert found(tape) == {"a": "disk", "b": "disk"}
    assert denoiser.templates.store.status()["host"].num_bytes <= num_bytes


def measure(model: Model, folder: Path, *names: str) -> list[Any]:
    """What each template takes in main memory."""
    measured = []
    for name in names:
        denoiser, _ = make_denoiser(model, disk=str(folder))
        assert denoiser.templates.store.get(denoiser.find_key(head_of(name)))
        measured.append(denoiser.templates.store.status()["host"])
    return measured


def test_a_job_that_fits_nowhere_is_computed_in_full(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path), host_bytes=1000)
    tape.rounds.append([jobs(small, ("a", 4), template=head_of("t"))])
    denoiser.run()
    assert found(tape) == {"a": None}
    assert len(tape.of(wire.Denoised)) == 1


def test_a_registration_goes_on_where_it_ended(small: Model, tmp_path: Path) -> None:
    assert [one.num_registered_steps for one in register_on_disk(small, tmp_path, "t", steps=12)] == [4, 8, 12]
    files(tmp_path)[1].unlink()
    assert [one.num_registered_steps for one in register_on_disk(small, tmp_path, "t", steps=12)] == [12]
    assert len(files(tmp_path)) == 3
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}


def test_forgotten_templates_leave_every_tier(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path / "disk", "t", "u")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path / "disk"), remote=(tmp_path / "remote").as_uri())
    tape.rounds.append([(wire.Forget(head_of("t")), [])])
    denoiser.run()
    told = [*tape.of(wire.Forgotten), *(message for message, _ in denoiser.templates.told())]
    assert wire.Forgotten("t") in told
    [kept] = [message for message in told if isinstance(message, wire.Kept) and message.template == "t"]
    assert kept.template_bytes == {}
    assert kept.tier_bytes["disk"] > 0
    assert {path.parent.name for path in files(tmp_path / "disk")} == {denoiser.find_key(head_of("u")).name}


def test_evicted_templates_are_told(small: Model, tmp_path: Path) -> None:
    [num_bytes] = {tier.num_bytes for tier in measure_registered(small, tmp_path)}
    denoiser, tape = make_denoiser(small, host_bytes=num_bytes)
    tape.rounds.append([template(small, "t"), template(small, "u")])
    denoiser.run()
    told = [*tape.of(wire.Kept), *(message for message, _ in denoiser.templates.told())]
    last = {message.template: message.template_bytes for message in told if isinstance(message, wire.Kept)}
    assert last["t"] == {}
    assert last["u"] == {"host": num_bytes}


def measure_registered(model: Model, folder: Path) -> list[Any]:
    register_on_disk(model, folder, "t")
    return measure(model, folder, "t")


def test_what_outlived_a_process_is_listed_and_its_picture_recalled(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t", "u", steps=8)
    files(tmp_path)[0].unlink()
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    heads = [head_of(name, steps=8) for name in "tuv"]
    tape.rounds.append(
        [(wire.List("these"), []), (wire.List("others"), []), *((wire.Recall(head), []) for head in heads)]
    )
    tape.is_busy = lambda: len(tape.of(wire.Listed)) < 2 or len(tape.of(wire.Recalled)) < 3
    denoiser.run()
    [these, others] = sorted(tape.of(wire.Listed), key=lambda listed: -len(listed.templates))
    assert others == wire.Listed("others", ())
    listings = {listing.template.id: listing for listing in these.templates}
    assert {name: listing.picture for name, listing in listings.items()} == {"t": SIZE, "u": SIZE}
    assert sorted(listing.num_registered_steps for listing in listings.values()) == [4, 8]
    assert all(listing.tier_bytes["disk"] > 0 for listing in listings.values())
    assert [denoiser.find_key(listing.template) for listing in listings.values()] == [
        denoiser.find_key(head_of(name, steps=8)) for name in listings
    ]
    recalled = {
        message.template: (message.size, frames) for message, frames in tape.sent if isinstance(message, wire.Recalled)
    }
    assert recalled["v"] == (None, [])
    size, [frame] = recalled["t"]
    assert size is not None
    assert (wire.read_picture(frame, size) == make_edit(size=SIZE).picture).all()

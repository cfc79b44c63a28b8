"""A worker's step loop in this process, with a line that records what is sent."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helpers.edits import make_edit
from instgenie.cluster import wire
from instgenie.cluster.config import ProcessConfig, ResolvedCache
from instgenie.cluster.orders import template_id
from instgenie.cost.table import linear_costs
from instgenie.engine.prepare import prepare
from instgenie.engine.register import template_edit, template_job
from instgenie.models.model import Model
from instgenie.scheduling.names import Batching
from instgenie.workers.denoise import Denoiser
from instgenie.workers.frames import job_frames

SIZE = (32, 48)
GUIDANCE = 0.0  # of the model "blend", into which no guidance enters
SHARED = linear_costs(per_step=1.0, per_token=0.0)  # a step takes as long, however many jobs share it


class Tape:
    """Plays recorded messages, one list per round of the loop, then stops the loop. Records what the loop sends."""

    def __init__(self) -> None:
        self.rounds: deque[list[tuple[wire.Message, list[wire.Frame]]]] = deque()
        self.sent: list[tuple[Any, Sequence[wire.Frame]]] = []
        self.woken = threading.Event()
        self.is_busy: Callable[[], Any] = lambda: False  # True while threads have something to report

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


def make_config(max_batch_size: int = 2, batching: Batching = "continuous", **cache: Any) -> ProcessConfig:
    kept = ResolvedCache(**{"host_bytes": 2**30} | cache)
    return ProcessConfig("a", "", "", "cpu", "auto", max_batch_size, batching, kept)


def make_denoiser(model: Model, batching: Batching = "continuous", **cache: Any) -> tuple[Denoiser, Tape]:
    """Two jobs are a batch."""
    return denoiser_of(make_config(batching=batching, **cache), model)


def denoiser_of(config: ProcessConfig, model: Model) -> tuple[Denoiser, Tape]:
    tape = Tape()
    denoiser = Denoiser(config, model, tape)  # type: ignore[arg-type]
    tape.is_busy = lambda: denoiser.queue.groups or denoiser.registrar.pending
    return denoiser, tape


def head_of(name: str, tenant: str = "me", weights: str = "these", steps: int = 4) -> wire.TemplateHead:
    """The head of a template whose picture has `name` as its digest."""
    return wire.TemplateHead(template_id(tenant, steps, GUIDANCE, name), name, tenant, weights, SIZE, steps, GUIDANCE)


def jobs(
    model: Model,
    *steps: tuple[str, int],
    template: wire.TemplateHead | None = None,
    is_sure: bool = True,
    **fields: Any,
) -> tuple[wire.Message, list[wire.Frame]]:
    """One group of jobs, each a name and a number of steps."""
    made = [(name, job_frames(prepare(make_edit(size=SIZE, steps=num, **fields), model))) for name, num in steps]
    message = wire.Denoise(tuple(wire.Denoising(name, 1, head, template, is_sure, 0) for name, (head, _) in made))
    return message, [frame for _, (_, frames) in made for frame in frames]


def with_terms(group: tuple[wire.Message, list[wire.Frame]], **terms: Any) -> tuple[wire.Message, list[wire.Frame]]:
    """The jobs of a group with other fields of their messages."""
    message, frames = group
    assert isinstance(message, wire.Denoise)
    return wire.Denoise(tuple(msgspec.structs.replace(job, **terms) for job in message.jobs)), frames


def registering(model: Model, name: str, urgent: bool = False, steps: int = 4) -> tuple[wire.Message, list[wire.Frame]]:
    edit = template_edit(make_edit(size=SIZE).picture, model, SIZE, steps, None)
    head, frames = job_frames(template_job(edit, model))
    pixels, template = make_edit(size=SIZE).picture, head_of(name, steps=steps)
    message = wire.Register(template.id, 1, template, head, urgent, pixels.shape[:2])
    return message, [*frames, *wire.picture_frames(pixels)]


def register_on_disk(model: Model, folder: Path, *names: str, steps: int = 4) -> list[wire.Registered]:
    """Register templates in a process that ends."""
    denoiser, tape = make_denoiser(model, disk=str(folder))
    tape.rounds.append([registering(model, name, steps=steps) for name in names])
    denoiser.run()
    registered: list[wire.Registered] = tape.of(wire.Registered)
    return registered


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/0*.safetensors"))


def batches(tape: Tape) -> list[str]:
    return ["".join(job.id for job in step.jobs) for step in tape.of(wire.BatchStepped)]


def found(tape: Tape) -> dict[str, Any]:
    return {message.id: message.tier for message in tape.of(wire.TierFound)}


def memory_status(model: Model, folder: Path, *names: str) -> list[Any]:
    """The state of main memory with each template in it."""
    measured = []
    for name in names:
        denoiser, _ = make_denoiser(model, disk=str(folder))
        assert denoiser.templates.store.get(denoiser.templates.keys.find(head_of(name)))
        measured.append(denoiser.templates.store.status()["host"])
    return measured

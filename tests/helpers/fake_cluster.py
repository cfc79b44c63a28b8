"""A coordinator whose processes are played by the test: messages are recorded, and answered when the test says so."""

from collections.abc import Sequence
from dataclasses import fields as fields_of
from typing import Any

import msgspec
import numpy as np

from instgenie.cluster import wire
from instgenie.cluster.config import CacheConfig, ClusterConfig, Role
from instgenie.cluster.coordinator import Coordinator
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Event, Order
from instgenie.cluster.processes import Process, make_workers
from instgenie.cluster.templates import TemplateRecord
from instgenie.cluster.wish import Wish
from instgenie.types import TierName

FACTS = wire.ModelFacts(
    name="tiny", family="flux", is_fill=False, own_size=64, steps=4, guidance=3.5, embeds_guidance=False,
    whole_strength=0.9, needs_true_guidance=True, patch=16, size_multiple=16,
    num_blocks=3, device="cpu", dtype="float32",
)  # fmt: skip
JOB = wire.JobHead({}, (4, 4), 1.0, "FlowSchedule", msgspec.Raw(b"\x90"), (None,), (wire.TensorHead("float32", (1,)),))
LATENTS = wire.TensorHead("float32", (1,))
WISHES = {field.name for field in fields_of(Wish)}


class FakeCluster:
    def __init__(self, **config: Any) -> None:
        self.config = ClusterConfig(**({"model": "tiny", "devices": ("cpu",), "register_after": 1} | config))
        self.workers = make_workers(self.config)
        self.sent: list[tuple[str, wire.Message]] = []
        self.listings: list[tuple[int, wire.List]] = []
        self.fetches: list[tuple[int, wire.Fetch]] = []
        self.deadly: tuple[Role, str] | None = None  # a role, and the id of the entry that kills its processes
        self.num_deaths = 0
        self.coordinator = Coordinator(self.config, self.workers, self.send)
        self.library, self.archive = self.coordinator.library, self.coordinator.archive
        self.naming, self.reporter = self.coordinator.naming, self.coordinator.reporter

    @property
    def entries(self) -> dict[str, Any]:
        """Edits that are not yet answered."""
        return self.coordinator.edits.entries

    def accept(self, *orders: Order) -> list[Ticket]:
        return self.coordinator.accept(orders)

    def send(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        if isinstance(message, wire.List):
            self.listings.append((process.worker, message))
        elif isinstance(message, wire.Fetch):
            self.fetches.append((process.worker, message))
        else:
            self.sent.append((f"{process.worker}.{process.role}", message))

    # processes

    def process(self, role: Role, worker: int = 0) -> Process:
        return self.workers[worker].processes[role]

    def open(self, *workers: int) -> None:
        """Make workers ready; without arguments, all."""
        for worker in workers or range(len(self.workers)):
            for process in self.workers[worker].processes.values():
                self.revive(process)

    def revive(self, process: Process) -> None:
        process.state = "ready"
        self.coordinator.ready(process, FACTS, "digest")

    def kill(self, role: Role, worker: int = 0) -> None:
        process = self.process(role, worker)
        process.state = "down"
        self.coordinator.died(process)

    def take(self, role: Role, worker: int = 0) -> list[Any]:
        """Messages that were sent to a process since the last call."""
        name = f"{worker}.{role}"
        taken = [message for to, message in self.sent if to == name]
        self.sent = [(to, message) for to, message in self.sent if to != name]
        return taken

    def next(self, role: Role, worker: int) -> Any:
        """The first message to a process that was not yet taken. The process dies of a deadly one, and comes back."""
        name = f"{worker}.{role}"
        if message := next((message for to, message in self.sent if to == name), None):
            self.sent.remove((name, message))
            if isinstance(message, wire.Cancel):
                self.drop(role, message, worker)
                return self.next(role, worker)
            if (role, message.id) == self.deadly:
                self.num_deaths += 1
                self.kill(role, worker)
                self.take(role, worker)
                self.revive(self.process(role, worker))
                return self.next(role, worker)
        return message

    # answers

    def answer(self, role: Role, worker: int, message: Any, *frames: wire.Frame) -> None:
        self.coordinator.handle(self.process(role, worker), message, list(frames))

    def prepare(self, worker: int = 0) -> None:
        while m := self.next("prepare", worker):
            self.prepared(m, worker)

    def prepared(self, m: Any, worker: int = 0) -> None:
        self.answer("prepare", worker, wire.Prepared(m.id, m.attempt, JOB, 16, 4, 4, 0.1), b"\0" * 4)

    def denoise(self, worker: int = 0) -> None:
        for message in self.take("denoise", worker):
            if isinstance(message, wire.Denoise):
                for job in message.jobs:
                    self.denoised(job, worker)
            elif isinstance(message, wire.Cancel):
                self.drop("denoise", message, worker)

    def drop(self, role: Role, message: wire.Cancel, worker: int = 0) -> None:
        """Drop what was cancelled."""
        self.answer(role, worker, wire.Dropped(message.id))

    def found(self, job: Any, tier: TierName | None, worker: int = 0) -> None:
        self.answer("denoise", worker, wire.TierFound(job.id, job.attempt, tier))

    def kept(self, template: str, worker: int = 0, **tier_bytes: int) -> None:
        message = wire.Kept(template, tier_bytes, tier_bytes)  # type: ignore[arg-type]
        self.answer("denoise", worker, message)

    def denoised(self, job: Any, worker: int = 0) -> None:
        if job.template and job.must_reuse:
            self.found(job, "host", worker)
        self.answer("denoise", worker, wire.Denoised(job.id, job.attempt, LATENTS, 16, 0.2), b"\0" * 4)

    def finish(self, worker: int = 0) -> None:
        while m := self.next("finish", worker):
            self.answer("finish", worker, wire.Painted(m.id, m.attempt, m.partial, 0.1, 0.6), b"png")

    def register(self, worker: int = 0) -> None:
        """Register what is prepared, and then what waits for its turn behind it."""
        for m in self.take("denoise", worker):
            if isinstance(m, wire.Register):
                self.answer("denoise", worker, wire.Registered(m.id, m.attempt, 4, 4, {"host": 1000}))
        waiting = [m for to, m in self.sent if to == f"{worker}.prepare" and isinstance(m, wire.PrepareTemplate)]
        for m in waiting:
            self.sent.remove((f"{worker}.prepare", m))
            self.prepared(m, worker)
        if waiting:
            self.register(worker)

    def run(self, worker: int = 0) -> None:
        self.prepare(worker)
        self.denoise(worker)
        self.finish(worker)

    # templates

    def ask_for_template(self) -> TemplateRecord:
        """Queue the registration of the usual order's picture."""
        return self.coordinator.register(self.naming.template_order("me", make_order().picture, None, None))

    def edit_and_register(self, order: Order) -> None:
        """Run an edit to its end, and register its picture unasked."""
        self.accept(order)
        self.run()
        self.prepare()
        self.register()

    def register_template(self) -> TemplateRecord:
        """Register the usual order's picture on the first worker."""
        template = self.ask_for_template()
        self.prepare()
        self.register()
        return template


def make_lasting(**config: Any) -> FakeCluster:
    """A fake cluster with a disk tier, whose workers are ready."""
    cluster = FakeCluster(cache=CacheConfig(disk="somewhere"), **config)
    cluster.open()
    return cluster


def make_order(seed: int = 0, picture_seed: int = 0, **fields: Any) -> Order:
    picture = np.random.default_rng(picture_seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    mask = np.zeros((64, 64), np.bool_)
    mask[:32, :32] = True
    wish = Wish(**{"prompt": "cat", "seed": seed} | {name: fields.pop(name) for name in list(fields) if name in WISHES})
    return Order(**{"tenant": "me", "picture": picture, "mask": mask, "wish": wish} | fields)


def events(ticket: Ticket) -> list[Event | None]:
    queue = ticket._entry.events
    return [queue.get_nowait() for _ in range(queue.qsize())]

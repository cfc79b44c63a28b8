"""How accepted work goes through the processes, stage by stage: prepare, denoise, finish. Knows no socket.

An entry is with exactly one process at a time, and what a stage made is kept until the next one has answered, so a
process that dies costs its own stage and no more. An answer counts if it comes from the process that holds the entry,
for the current attempt.

Whether an edit uses its template's activations is decided once: when it is accepted, if the cluster knows of them; if
they may be on disk or further down, when its worker has looked. Wherever and however often it is run again after that,
its picture is the same. A worker that lacks the activations of such an edit registers them first; only where that
fails, or where they fit nowhere, the edit is computed in full.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import MAX_DEATHS, Entry, Registering, Ticket
from instgenie.cluster.library import Library, working_size_of
from instgenie.cluster.messages import Send, denoising, finish_message, prepare_message
from instgenie.cluster.orders import (
    Event,
    Facts,
    Failed,
    FailureKind,
    Finished,
    Order,
    Partial,
    Queued,
    Stepped,
    Tier,
)
from instgenie.cluster.places import Places
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.status import Observer
from instgenie.cluster.templates import Template, template_id
from instgenie.errors import QueueFullError
from instgenie.scheduling.router import Work
from instgenie.telemetry import traces

log = logging.getLogger(__name__)


class Flow:
    def __init__(self, config: ClusterConfig, workers: Sequence[Worker], send: Send) -> None:
        self.config = config
        self.workers = workers
        self.send = send
        self.places = Places(config.policy, workers)
        self.library = Library(config, self.places, send)
        self.entries: dict[str, Entry] = {}  # orders that are not answered
        self.observers: list[Observer] = []
        self.counts: Counter[str] = Counter()
        self.cache_hits: Counter[Tier] = Counter()
        self._handlers: dict[type, Callable[[Process, Any, list[wire.Frame]], None]] = {
            wire.Failed: self._on_failed,
            wire.Prepared: self._on_prepared,
            wire.Priced: self._on_priced,
            wire.Joined: self._on_joined,
            wire.Stepped: self._on_stepped,
            wire.Glimpsed: self._on_glimpsed,
            wire.Denoised: self._on_denoised,
            wire.Registered: self.library.on_registered,
            wire.Found: self._on_found,
            wire.Missing: self._on_missing,
            wire.Kept: self.library.on_kept,
            wire.Forgotten: self.library.on_forgotten,
            wire.Listed: self.library.on_listed,
            wire.Recalled: self.library.on_recalled,
            wire.Painted: self._on_painted,
        }

    # what comes in

    def accept(self, orders: Sequence[Order]) -> list[Ticket]:
        """Orders of one request share a worker and a batch."""
        num_waiting = self.num_waiting
        if num_waiting + len(orders) > self.config.max_queue:
            raise QueueFullError(num_waiting, self.config.max_queue, self._retry_after())
        group: list[Entry] = []
        works = self._works_of(orders)
        for order, work in zip(orders, works, strict=True):
            group.append(Entry(uuid.uuid4().hex, order, work, group))
        worker = self.places.choose(works, self.library.holders(works[0].template))
        tickets = [Ticket(entry, self.cancel) for entry in group]
        for entry in list(group):
            self._decide(entry, worker)
            self.entries[entry.id] = entry
            self.places.settle(entry, worker)
            self._foresee(entry)
            self.places.put(entry)
        self.pump()
        return tickets

    def cancel(self, entry: Entry) -> None:
        if self.entries.get(entry.id) is not entry:
            return
        holder = self.places.process_of(entry)
        if entry.id in holder.held and holder.role == "denoise":
            self.send(holder, wire.Cancel(entry.id))
        self.counts["cancelled"] += 1
        for observer in self.observers:
            observer.cancelled()
        self._drop(entry)
        self.pump()

    def register(self, registering: Registering) -> Template:
        """Asked for by a client."""
        template = self.library.ask_for(registering)
        self.pump()
        return template

    def forget(self, template: Template) -> None:
        """Edits that do not yet use it never will."""
        for entry in self.entries.values():
            if entry.template == template.id and not entry.is_running:
                entry.run_dense()
        self.library.forget(template)
        self.pump()

    def handle(self, process: Process, message: wire.AnyMessage, frames: list[wire.Frame]) -> None:
        self._handlers[type(message)](process, message, frames)
        self.pump()

    def ready(self, process: Process, facts: wire.ModelFacts, digest: str) -> None:
        """What waits for processes that are not there goes to those that are."""
        self.library.model_facts = facts
        worker = self.workers[process.worker]
        worker.digests[process.role] = digest
        if process.role == "denoise":
            self.library.send_forgetting(worker)
        if worker.processes["denoise"].is_ready:
            self.library.ask_what_there_is(worker)
        for other in self.places.processes:
            if not other.is_ready:
                _, queue = other.empty()
                for entry in queue:
                    self.places.put(entry)
        self.pump()

    def died(self, process: Process) -> None:
        held, queue = process.empty()
        if process.role == "denoise":
            self.library.lose_all(self.workers[process.worker])
        for entry in held:
            log.warning("run again", extra={"job": entry.id, "attempt": entry.attempt, "num_deaths": entry.num_deaths})
            self._leave(entry)
            entry.lose()
        for entry in held + queue:
            if entry.num_deaths >= MAX_DEATHS:
                self._fail(entry, "crashed", f"{MAX_DEATHS} processes died of it")
            elif process.state == "failed" and self._is_lost(entry):
                self._fail(entry, "internal", process.message)
            else:
                self.places.put(entry)
        self.pump()

    def _is_lost(self, entry: Entry) -> bool:
        """Templates are tied to their worker; edits go elsewhere as long as there is an elsewhere."""
        return isinstance(entry.order, Registering) or all(worker.state == "failed" for worker in self.workers)

    def give_up(self, reason: str) -> None:
        for entry in list(self.entries.values()):
            self._fail(entry, "internal", reason)

    # where entries go

    def _decide(self, entry: Entry, worker: Worker) -> None:
        """Whether it uses its template's activations; or whether its worker is to look for them."""
        for observer in self.observers:
            observer.accepted(float(entry.edit.mask.mean()))
        name = entry.work.template
        if not can_reuse(entry.edit):
            return
        entry.is_sure = name in worker.load.templates
        if name:
            worker.load.expect(name)
        if entry.is_sure or (name and self.library.may_be_below(name)):
            entry.template = name
        else:
            self._tell_found(entry)

    def _foresee(self, entry: Entry) -> None:
        """Loading starts now, if the edit is among those that its worker takes next."""
        worker = self.workers[entry.worker]
        process = worker.processes["denoise"]
        if process.is_ready and worker.load.num_edits <= process.max_held and (head := self.library.head(entry)):
            self.send(process, wire.Fetch(entry.id, head))

    def _tell_found(self, entry: Entry) -> None:
        """An edit counts once, however often it is run."""
        if entry.is_told:
            return
        entry.is_told = True
        self.counts["queries"] += 1
        if entry.tier:
            self.cache_hits[entry.tier] += 1
        for observer in self.observers:
            observer.cache_query(entry.tier)

    def pump(self) -> None:
        """Sends what can be sent and tells those who wait how many are before them."""
        while taken := [(process, group) for process in self.places.processes for group in process.take()]:
            for process, entries in taken:  # one may put another entry into a queue
                self._try_dispatch(process, entries)
        self._tell_positions()

    def _try_dispatch(self, process: Process, entries: list[Entry]) -> None:
        try:
            self._dispatch(process, entries)
        except Exception:
            log.exception("not sent", extra={"job": entries[0].id})
            for entry in entries:
                self._fail(entry, "internal", "the edit could not be sent to a worker")

    def _dispatch(self, process: Process, entries: list[Entry]) -> None:
        head = entries[0]
        if isinstance(head.order, Registering):
            self.library.dispatch(process, head, head.order)
        elif head.stage == "prepare":
            self.send(process, *prepare_message(head))
        elif head.stage == "finish":
            assert head.denoised is not None
            self.send(process, *finish_message(head, head.denoised.latents, None, head.latents))
        else:
            self._dispatch_jobs(process, entries)

    def _dispatch_jobs(self, process: Process, entries: list[Entry]) -> None:
        known = self.workers[process.worker].load.templates
        missing = [entry for entry in entries if entry.is_sure and entry.template not in known]
        for entry in missing:
            self.library.park(entry)
        if going := [entry for entry in entries if entry not in missing]:
            frames = [frame for entry in going for frame in entry.tensors]
            jobs = tuple(denoising(entry, self.library.head(entry)) for entry in going)
            self.send(process, wire.Denoise(jobs), frames)

    def _answered(self, process: Process, message: Any) -> Entry | None:
        """The entry that is answered, unless the answer is to an attempt that was given up."""
        entry = process.held.get(message.id)
        if entry is None or entry.attempt != message.attempt:
            return None
        del process.held[message.id]
        return entry

    # edits

    def _on_prepared(self, process: Process, message: wire.Prepared, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            entry.prepared, entry.tensors = message, frames
            self.workers[process.worker].load.measure_chore("prepare", message.seconds)
            self._trace_wait(entry, "prepare", message.seconds)
            if isinstance(entry.order, Registering):
                entry.move("denoise")
                self.places.put(entry)
            else:
                entry.move("gather")
                self._gather(entry.group)

    def _gather(self, group: list[Entry]) -> None:
        """Denoised together: who is prepared waits for the others."""
        if any(entry.stage == "prepare" for entry in group):
            return
        gathered = [entry for entry in group if entry.stage == "gather"]
        for entry in gathered:
            entry.move("denoise")
            self.places.settle(entry, self.workers[gathered[0].worker])
            self.places.put(entry)

    def _on_priced(self, process: Process, message: wire.Priced, frames: list[wire.Frame]) -> None:
        self.workers[process.worker].load.costs = message.costs

    def _on_joined(self, process: Process, message: wire.Joined, frames: list[wire.Frame]) -> None:
        for told, plan in zip(message.jobs, message.plans, strict=True):
            entry = process.held.get(told.id)
            if entry and entry.attempt == told.attempt:
                entry.is_running, entry.plan = True, plan
                self._trace_wait(entry, "denoise")
                for observer in self.observers:
                    observer.joined(process.worker, entry.status)

    def _leave(self, entry: Entry) -> None:
        """Out of the batch, if it is in one."""
        if entry.is_running:
            entry.is_running = False
            for observer in self.observers:
                observer.left(entry.worker, entry.id)

    def _on_stepped(self, process: Process, message: wire.Stepped, frames: list[wire.Frame]) -> None:
        worker = self.workers[process.worker]
        worker.step(message.seconds, message.predicted_seconds)
        worker.num_interruptions = message.num_interruptions
        for observer in self.observers:
            observer.step(worker.index, message.seconds, len(message.jobs))
        for told in message.jobs:
            entry = process.held.get(told.id)
            if entry and entry.attempt == told.attempt:
                entry.step = told.step
                worker.load.step(entry.id)
                entry.events.put_nowait(Stepped(told.step, entry.num_steps))

    def _on_glimpsed(self, process: Process, message: wire.Glimpsed, frames: list[wire.Frame]) -> None:
        """A picture on the way is shown if it can be; it is nobody's duty."""
        entry = process.held.get(message.id)
        finisher = self.workers[process.worker].processes.get("finish", process)
        if entry and entry.attempt == message.attempt and finisher.is_ready:
            self.send(finisher, *finish_message(entry, message.latents, message.index, frames))

    def _on_denoised(self, process: Process, message: wire.Denoised, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            entry.denoised, entry.latents = message, frames
            entry.waits_from = time.monotonic()
            self._leave(entry)
            self.workers[process.worker].load.hand_over(entry.id)
            entry.move("finish")
            self.places.put(entry)

    def _on_painted(self, process: Process, message: wire.Painted, frames: list[wire.Frame]) -> None:
        [picture] = (bytes(frame) for frame in frames)
        if message.partial is not None:
            entry = self.entries.get(message.id)
            if entry and entry.attempt == message.attempt:
                entry.events.put_nowait(Partial(message.partial, picture))
        elif entry := self._answered(process, message):
            self._trace_wait(entry, "finish", message.seconds + message.thread_seconds)
            self.workers[process.worker].load.measure_chore("finish", message.period)
            facts = self._facts_of(entry, message)
            seconds = time.monotonic() - entry.accepted_at
            self.counts["finished"] += 1
            log.info("finished", extra={"job": entry.id, "seconds": round(seconds, 3), "worker": entry.worker})
            for observer in self.observers:
                observer.finished(facts, seconds)
            self._answer(entry, Finished(picture, facts))
            self._register_unasked(entry)

    def _trace_wait(self, entry: Entry, stage: str, worked: float = 0.0) -> None:
        """How long it waited for a stage; seconds of work at it have passed since."""
        now = time.monotonic()
        if isinstance(entry.order, Order):
            waited = now - entry.waits_from - worked
            facts = {"stage": stage, "worker": entry.worker, "attempt": entry.attempt}
            traces.record(entry.order.trace, "queue", waited, worked, **facts)
        entry.waits_from = now

    def _on_failed(self, process: Process, message: wire.Failed, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            self._fail(entry, message.kind, message.message, message.param)

    def _fail(self, entry: Entry, kind: FailureKind, message: str, param: str | None = None) -> None:
        log.warning("failed", extra={"job": entry.id, "kind": kind, "reason": message})
        if isinstance(entry.order, Registering):
            self.library.fail(entry, message)
            return
        self.counts["failed"] += 1
        for observer in self.observers:
            observer.failed(kind)
        self._answer(entry, Failed(kind, message, param))

    def _answer(self, entry: Entry, event: Event) -> None:
        entry.events.put_nowait(event)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self.entries.pop(entry.id, None)
        self._leave(entry)
        self.workers[entry.worker].load.remove(entry.id)
        self.places.process_of(entry).remove(entry)
        self.library.drop(entry)
        entry.group.remove(entry)
        self._gather(entry.group)
        entry.events.put_nowait(None)

    def _facts_of(self, entry: Entry, painted: wire.Painted) -> Facts:
        prepared, denoised = entry.prepared, entry.denoised
        assert prepared is not None
        assert denoised is not None
        height, width, _ = entry.edit.picture.shape
        finish_seconds = painted.seconds + painted.thread_seconds
        worked = prepared.seconds + denoised.seconds + finish_seconds
        num_saved = prepared.num_steps * (prepared.num_tokens - denoised.num_computed_tokens)
        per_token = self.workers[entry.worker].load.seconds_per_token
        return Facts(
            seed=entry.edit.wish.seed,
            width=width,
            height=height,
            num_tokens=prepared.num_tokens,
            num_masked_tokens=prepared.num_masked_tokens,
            num_computed_tokens=denoised.num_computed_tokens,
            cache_tier=entry.tier,
            worker=entry.worker,
            num_attempts=entry.attempt,
            queue_seconds=max(time.monotonic() - entry.accepted_at - worked, 0.0),
            prepare_seconds=prepared.seconds,
            denoise_seconds=denoised.seconds,
            dense_seconds=denoised.seconds + num_saved * per_token,
            finish_seconds=finish_seconds,
            finish_thread_seconds=painted.thread_seconds,
        )

    # what was found

    def _on_found(self, process: Process, message: wire.Found, frames: list[wire.Frame]) -> None:
        entry = process.held.get(message.id)
        if entry is None or entry.attempt != message.attempt:
            return
        entry.tier = message.tier
        self._tell_found(entry)
        if message.tier is None:
            entry.run_dense()
        elif entry.template:
            entry.is_sure = True
            self.library.meet(entry.template, entry)
        self.places.settle(entry, self.workers[process.worker])

    def _on_missing(self, process: Process, message: wire.Missing, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            entry.attempt += 1
            if not self.library.lacks(process.worker, message.template):  # it was forgotten
                entry.run_dense()
            self.places.put(entry)

    def _register_unasked(self, entry: Entry) -> None:
        is_wanted = self.config.reuse and can_reuse(entry.edit)
        if entry.template is None and self.library.model_facts is not None and is_wanted:
            registering = self.library.registering_of(entry.edit)
            name = entry.work.template or template_id(registering)
            self.library.register_unasked(name, registering, self.workers[entry.worker])

    # numbers

    @property
    def num_waiting(self) -> int:
        return sum(entry.is_waiting for entry in self.entries.values())

    @property
    def num_running(self) -> int:
        return len(self.entries) - self.num_waiting

    def _works_of(self, orders: Sequence[Order]) -> list[Work]:
        """Pictures of one request are mostly one picture, which is hashed once."""
        facts = self.library.model_facts
        if facts is None:  # no worker has ever been ready: anything is as good
            return [Work(order.wish.steps or 1, 1, 1) for order in orders]
        names: dict[tuple[object, ...], str] = {}
        works = []
        for order in orders:
            registering = self.library.registering_of(order)
            key = id(order.picture), order.tenant, registering.steps, registering.guidance
            if can_reuse(order) and key not in names:
                names[key] = template_id(registering)
            height, width = working_size_of(*order.picture.shape[:2], facts.size_multiple, facts.own_size)
            num_tokens = (height // facts.patch) * (width // facts.patch)
            num_masked = max(round(num_tokens * float(order.mask.mean())), 1)
            works.append(Work(registering.steps, num_tokens, num_masked, names[key] if can_reuse(order) else None))
        return works

    def _retry_after(self) -> float:
        """Seconds until the worker that is done first is done."""
        return max(min(worker.load.seconds for worker in self.workers), 1.0)

    def _tell_positions(self) -> None:
        places: Counter[int] = Counter()
        for entry in sorted(self.entries.values(), key=lambda entry: entry.number):
            if entry.is_waiting:
                position = places[entry.worker]
                places[entry.worker] += 1
                if entry.position != position:
                    entry.position = position
                    entry.events.put_nowait(Queued(position))


def can_reuse(order: Order) -> bool:
    """Whether activations would spare it anything."""
    return order.wish.quality != "exact" and not order.mask.all()

"""How accepted work goes through the processes, stage by stage: prepare, denoise, finish. Knows no socket.

An entry is with exactly one process at a time, and what a stage made is kept until the next one has answered, so a
process that dies costs its own stage and no more. An answer counts if it comes from the process that holds the entry,
for the current attempt.

Whether an edit uses its template's activations is decided once: when it is accepted, if the cluster knows of them; if
they may be on disk or further down, when its worker has looked. Wherever and however often it is run again after that,
its picture is the same. A worker that lacks the activations of such an edit registers them first; only where that
fails, or where they fit nowhere, the edit is computed in full.
"""

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from instgenie import wire
from instgenie.cluster.entries import MAX_DEATHS, Entry, Registering, Ticket
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
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.status import Observer
from instgenie.cluster.templates import SHARED, Template, template_id
from instgenie.config import ClusterConfig, Role
from instgenie.errors import QueueFullError
from instgenie.picture import working_size
from instgenie.router import Router, Work
from instgenie.types import Pixels

MAX_UNASKED = 4  # templates on their way to activations though nobody asked for them

log = logging.getLogger(__name__)
working_size_of = lru_cache(working_size)


class Send(Protocol):
    def __call__(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None: ...


class Flow:
    def __init__(self, config: ClusterConfig, workers: Sequence[Worker], send: Send) -> None:
        self.config = config
        self.workers = workers
        self.send = send
        self.router = Router(config.policy)
        self.model_facts: wire.ModelFacts | None = None
        self.entries: dict[str, Entry] = {}  # orders that are not answered
        self.templates: dict[str, Template] = {}
        self.observers: list[Observer] = []
        self.counts: Counter[str] = Counter()
        self.cache_hits: Counter[Tier] = Counter()
        self._forgetting: dict[int, dict[str, wire.TemplateHead]] = {worker.index: {} for worker in workers}
        self._numbers = itertools.count()
        self._handlers: dict[type, Callable[[Process, Any, list[wire.Frame]], None]] = {
            wire.Failed: self._on_failed,
            wire.Prepared: self._on_prepared,
            wire.Joined: self._on_joined,
            wire.Stepped: self._on_stepped,
            wire.Glimpsed: self._on_glimpsed,
            wire.Denoised: self._on_denoised,
            wire.Registered: self._on_registered,
            wire.Found: self._on_found,
            wire.Missing: self._on_missing,
            wire.Kept: self._on_kept,
            wire.Forgotten: self._on_forgotten,
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
            group.append(Entry(uuid.uuid4().hex, next(self._numbers), order, work, group))
        worker = self._choose(works)
        tickets = [Ticket(entry, self.cancel) for entry in group]
        for entry in list(group):
            self._decide(entry, worker)
            self.entries[entry.id] = entry
            self._settle(entry, worker)
            self._foresee(entry)
            self._place(entry)
        self.pump()
        return tickets

    def cancel(self, entry: Entry) -> None:
        if self.entries.get(entry.id) is not entry:
            return
        holder = self._process_of(entry)
        if entry.id in holder.held and holder.role == "denoise":
            self.send(holder, wire.Cancel(entry.id))
        self.counts["cancelled"] += 1
        for observer in self.observers:
            observer.cancelled()
        self._drop(entry)
        self.pump()

    def register(self, registering: Registering) -> Template:
        """Asked for by a client."""
        assert self.model_facts is not None
        name = template_id(registering)
        template = self.templates.setdefault(name, Template(name, registering))
        template.is_asked_for = True
        if template.state == "failed" or not (template.is_held or template.entries):
            worker = self._choose([Work(registering.steps, 0, 0, name)])
            self._register_on(template, worker)
            self.pump()
        return template

    def forget(self, template: Template) -> None:
        """Every worker forgets it, in all its tiers; one that is not there does when it comes back."""
        del self.templates[template.id]
        for worker in self.workers:
            worker.load.templates.discard(template.id)
        for entry in self.entries.values():
            if entry.template == template.id and not entry.is_running:
                entry.run_dense()
        for worker in self.workers:
            if head := self._head_of(template.id, template.registering, worker):
                self._forgetting[worker.index][template.id] = head
            if worker.processes["denoise"].is_ready:
                self.send(worker.processes["denoise"], wire.Cancel(template.id))
                self._send_forgetting(worker)
        for entry in template.entries.values():
            self._process_of(entry).remove(entry)
        self._unpark(template)
        self.pump()

    def handle(self, process: Process, message: wire.AnyMessage, frames: list[wire.Frame]) -> None:
        self._handlers[type(message)](process, message, frames)
        self.pump()

    def ready(self, process: Process, facts: wire.ModelFacts, digest: str) -> None:
        """What waits for processes that are not there goes to those that are."""
        self.model_facts = facts
        self.workers[process.worker].digests[process.role] = digest
        if process.role == "denoise":
            self._send_forgetting(self.workers[process.worker])
        for other in self._all_processes():
            if not other.is_ready:
                _, queue = other.empty()
                for entry in queue:
                    self._place(entry)
        self.pump()

    def died(self, process: Process) -> None:
        held, queue = process.empty()
        if process.role == "denoise":
            self._lose_templates(self.workers[process.worker])
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
                self._place(entry)
        self.pump()

    def _is_lost(self, entry: Entry) -> bool:
        """Templates are tied to their worker; edits go elsewhere as long as there is an elsewhere."""
        return isinstance(entry.order, Registering) or all(worker.state == "failed" for worker in self.workers)

    def give_up(self, reason: str) -> None:
        for entry in list(self.entries.values()):
            self._fail(entry, "internal", reason)

    # where entries go

    def _choose(self, works: Sequence[Work]) -> Worker:
        """Of the workers that are ready; if none is, of those that may be."""
        ready = [worker for worker in self.workers if worker.is_ready]
        hopeful = [worker for worker in self.workers if worker.state != "failed"]
        loads = [worker.load for worker in ready or hopeful or self.workers]
        total = Work(
            num_steps=max(work.num_steps for work in works),
            num_tokens=sum(work.num_tokens for work in works),
            num_masked_tokens=sum(work.num_masked_tokens for work in works),
            template=works[0].template,
        )
        template = self.templates.get(total.template or "")
        holders = [self.workers[index] for index in template.holders] if template else []
        holding = [worker.load for worker in holders if worker.is_ready]
        return self.workers[self.router.choose(total, loads, holding)]

    def _decide(self, entry: Entry, worker: Worker) -> None:
        """Whether it uses its template's activations; or whether its worker is to look for them."""
        for observer in self.observers:
            observer.accepted(float(entry.edit.mask.mean()))
        name = entry.work.template
        if not can_reuse(entry.edit):
            return
        entry.is_sure = name in worker.load.templates
        if entry.is_sure or (name and self._may_be_below(name)):
            entry.template = name
        else:
            self._tell_found(entry)

    def _may_be_below(self, template: str) -> bool:
        """Whether activations that the cluster does not know of may lie in a tier that outlives it."""
        is_known = template in self.templates or any(template in heads for heads in self._forgetting.values())
        return self.config.reuse and self.config.cache.is_lasting and not is_known

    def _foresee(self, entry: Entry) -> None:
        """Loading starts now, if the edit is among those that its worker takes next."""
        worker = self.workers[entry.worker]
        process = worker.processes["denoise"]
        if process.is_ready and worker.load.num_edits <= process.max_held and (head := self._head(entry)):
            self.send(process, wire.Fetch(entry.id, head))

    def _head(self, entry: Entry) -> wire.TemplateHead | None:
        if entry.template is None:
            return None
        return self._head_of(entry.template, self.registering_of(entry.edit), self.workers[entry.worker])

    def _head_of(self, template: str, registering: Registering, worker: Worker) -> wire.TemplateHead | None:
        """None as long as it is not known which model the worker has."""
        facts = self.model_facts
        if facts is None or worker.identity is None:
            return None
        size = working_size_of(*registering.picture.shape[:2], facts.unit, facts.own_size)
        return wire.TemplateHead(
            template, registering.tenant, worker.identity, size, registering.steps, registering.guidance
        )

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

    def _settle(self, entry: Entry, worker: Worker) -> None:
        self.workers[entry.worker].load.remove(entry.id)
        entry.worker = worker.index
        if isinstance(entry.order, Order):
            worker.load.add(entry.id, entry.num_steps - entry.step, entry.num_computed_tokens)

    def _place(self, entry: Entry) -> None:
        """Into the queue of its stage's process; an edit goes to another worker if its own is not ready and one is."""
        is_stranded = not self._process_of(entry).is_ready and any(worker.is_ready for worker in self.workers)
        if is_stranded and isinstance(entry.order, Order):
            self._settle(entry, self._choose([entry.work]))
        self._process_of(entry).put(entry)

    def _process_of(self, entry: Entry) -> Process:
        role: Role = entry.stage if entry.stage in ("prepare", "finish") else "denoise"
        processes = self.workers[entry.worker].processes
        return processes.get(role, processes["denoise"])

    def pump(self) -> None:
        """Sends what can be sent and tells those who wait how many are before them."""
        while taken := [(process, group) for process in self._all_processes() for group in process.take()]:
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
            self.send(process, *self._template_message(head, head.order))
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
            self._park(entry)
        if going := [entry for entry in entries if entry not in missing]:
            frames = [frame for entry in going for frame in entry.tensors]
            jobs = tuple(denoising(entry, self._head(entry)) for entry in going)
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
            if isinstance(entry.order, Registering):
                entry.move("denoise")
                self._place(entry)
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
            self._settle(entry, self.workers[gathered[0].worker])
            self._place(entry)

    def _on_joined(self, process: Process, message: wire.Joined, frames: list[wire.Frame]) -> None:
        for told, plan in zip(message.jobs, message.plans, strict=True):
            entry = process.held.get(told.id)
            if entry and entry.attempt == told.attempt:
                entry.is_running, entry.plan = True, plan
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
        worker.step(message.seconds, message.num_computed_tokens)
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
            self._leave(entry)
            self.workers[process.worker].load.remove(entry.id)
            entry.move("finish")
            self._place(entry)

    def _on_painted(self, process: Process, message: wire.Painted, frames: list[wire.Frame]) -> None:
        [picture] = (bytes(frame) for frame in frames)
        if message.partial is not None:
            entry = self.entries.get(message.id)
            if entry and entry.attempt == message.attempt:
                entry.events.put_nowait(Partial(message.partial, picture))
        elif entry := self._answered(process, message):
            facts = self._facts_of(entry, message)
            seconds = time.monotonic() - entry.accepted_at
            self.counts["finished"] += 1
            log.info("finished", extra={"job": entry.id, "seconds": round(seconds, 3), "worker": entry.worker})
            for observer in self.observers:
                observer.finished(facts, seconds)
            self._answer(entry, Finished(picture, facts))
            self._register_unasked(entry)

    def _on_failed(self, process: Process, message: wire.Failed, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            self._fail(entry, message.kind, message.message, message.param)

    def _fail(self, entry: Entry, kind: FailureKind, message: str, param: str | None = None) -> None:
        log.warning("failed", extra={"job": entry.id, "kind": kind, "reason": message})
        if isinstance(entry.order, Registering):
            self._fail_template(entry, message)
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
        self._process_of(entry).remove(entry)
        if entry.template in self.templates and entry in (parked := self.templates[entry.template].parked):
            parked.remove(entry)
        entry.group.remove(entry)
        self._gather(entry.group)
        entry.events.put_nowait(None)

    def _facts_of(self, entry: Entry, painted: wire.Painted) -> Facts:
        prepared, denoised = entry.prepared, entry.denoised
        assert prepared is not None
        assert denoised is not None
        height, width, _ = entry.edit.picture.shape
        worked = prepared.seconds + denoised.seconds + painted.seconds
        num_saved = prepared.num_steps * (prepared.num_tokens - denoised.num_computed_tokens)
        pace = self.workers[entry.worker].load.pace
        return Facts(
            seed=entry.edit.seed,
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
            dense_seconds=denoised.seconds + pace.seconds(0, num_saved),
            finish_seconds=painted.seconds,
        )

    # templates

    def registering(self, tenant: str, picture: Pixels, steps: int | None, guidance: float | None) -> Registering:
        """What is None, and what makes no difference to the model, is filled in."""
        facts = self.model_facts
        assert facts is not None
        steps = facts.steps if steps is None else steps
        guidance = facts.guidance if guidance is None or not facts.embeds_guidance else guidance
        return Registering(tenant, picture, steps, float(guidance))

    def registering_of(self, order: Order) -> Registering:
        return self.registering(order.tenant, order.picture, order.steps, order.guidance)

    def _register_unasked(self, entry: Entry) -> None:
        """The next edit of this picture will find its activations."""
        is_wanted = self.config.reuse and can_reuse(entry.edit)
        if entry.template is not None or self.model_facts is None or not is_wanted:
            return
        registering = self.registering_of(entry.edit)
        name = entry.work.template or template_id(registering)
        num_unasked = sum(not template.is_asked_for and bool(template.entries) for template in self.templates.values())
        if name not in self.templates and num_unasked < MAX_UNASKED:
            self.templates[name] = Template(name, registering)
            self._register_on(self.templates[name], self.workers[entry.worker])

    def _register_on(self, template: Template, worker: Worker, is_urgent: bool = False) -> None:
        if worker.index in template.entries:
            self._hurry(template.entries[worker.index], is_urgent)
            return
        order = template.registering
        work = Work(order.steps, 0, 0)
        entry = Entry(template.id, next(self._numbers), order, work, [], worker.index, is_urgent=is_urgent)
        template.entries[worker.index] = entry
        if not template.is_held:
            template.state = "queued"
        self.workers[worker.index].processes.get("prepare", worker.processes["denoise"]).put(entry)

    def _template_message(self, entry: Entry, order: Registering) -> tuple[wire.Message, Sequence[wire.Frame]]:
        if entry.stage == "prepare":
            size = order.picture.shape[:2]
            message = wire.PrepareTemplate(entry.id, entry.attempt, order.steps, order.guidance, size)
            return message, wire.picture_frames(order.picture)
        head = self._head_of(entry.id, order, self.workers[entry.worker])
        assert head is not None
        assert entry.prepared is not None
        return wire.Register(entry.id, entry.attempt, head, entry.prepared.job, entry.is_urgent), entry.tensors

    def _hurry(self, entry: Entry, is_urgent: bool) -> None:
        is_news = is_urgent and not entry.is_urgent
        entry.is_urgent |= is_urgent
        process = self._process_of(entry)
        if is_news and entry.stage == "denoise" and entry.id in process.held:
            self._dispatch(process, [entry])

    def _park(self, entry: Entry) -> None:
        """An edit that is to use activations its worker does not have waits until they are registered there."""
        assert entry.template is not None
        self._process_of(entry).remove(entry)
        template = self.templates.setdefault(entry.template, Template(entry.template, self.registering_of(entry.edit)))
        entry.move("park")
        template.parked.append(entry)
        self._register_on(template, self.workers[entry.worker], is_urgent=True)

    def _unpark(self, template: Template, worker: int | None = None) -> None:
        going = [entry for entry in template.parked if worker in (None, entry.worker)]
        for entry in going:
            template.parked.remove(entry)
            entry.move("denoise")
            self._place(entry)

    def _on_registered(self, process: Process, message: wire.Registered, frames: list[wire.Frame]) -> None:
        template = self.templates.get(message.id)
        entry = process.held.get(message.id)
        if template is None or entry is None or entry.attempt != message.attempt:
            return
        worker = self.workers[process.worker]
        template.num_registered_steps = message.num_registered_steps
        template.state = "registering"
        if message.num_registered_steps == message.num_steps:
            del process.held[message.id]
            template.entries.pop(process.worker, None)
            template.state = "ready"
            template.keep_in_memory(process.worker, message.tier_bytes)
            worker.load.templates.add(template.id)
            self._unpark(template, process.worker)

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
            self._meet(entry.template, entry)
        self._settle(entry, self.workers[process.worker])

    def _meet(self, name: str, entry: Entry) -> None:
        """A template that was registered before the cluster was there."""
        if name not in self.templates:
            registering = self.registering_of(entry.edit)
            met = Template(name, registering, state="ready", num_registered_steps=registering.steps)
            self.templates[name] = met
        self.workers[entry.worker].load.templates.add(name)

    def _on_missing(self, process: Process, message: wire.Missing, frames: list[wire.Frame]) -> None:
        if entry := self._answered(process, message):
            entry.attempt += 1
            if template := self.templates.get(message.template):
                template.keep(process.worker, {})
                self._tell_router(template)
            else:  # it was forgotten
                entry.run_dense()
            self._place(entry)

    def _on_kept(self, process: Process, message: wire.Kept, frames: list[wire.Frame]) -> None:
        self.workers[process.worker].tier_bytes = message.tier_bytes
        template = self.templates.get(message.template or "")
        if template is None:
            return
        template.keep(process.worker, message.template_bytes)
        self._tell_router(template)
        if not (template.is_held or template.entries or template.parked):
            template.state, template.message = "failed", "its activations made room for others: register it again"
            if not template.is_asked_for:
                del self.templates[template.id]

    def _tell_router(self, template: Template) -> None:
        for worker in self.workers:
            if template.is_held_by(worker.index):
                worker.load.templates.add(template.id)
            else:
                worker.load.templates.discard(template.id)

    def _on_forgotten(self, process: Process, message: wire.Forgotten, frames: list[wire.Frame]) -> None:
        self._forgetting[process.worker].pop(message.template, None)

    def _send_forgetting(self, worker: Worker) -> None:
        for head in self._forgetting[worker.index].values():
            self.send(worker.processes["denoise"], wire.Forget(head))

    def _lose_templates(self, worker: Worker) -> None:
        """What is on disk is not lost with a process."""
        worker.tier_bytes = {tier: num for tier, num in worker.tier_bytes.items() if tier in SHARED}
        for name in list(worker.load.templates):
            self._lose_template(name, worker)
            template = self.templates.get(name)
            if template is None or template.is_held:
                continue
            if template.is_asked_for:
                template.num_registered_steps = 0
                self._register_on(template, worker)
            elif not (template.entries or template.parked):
                del self.templates[name]

    def _lose_template(self, name: str, worker: Worker) -> None:
        template = self.templates.get(name)
        if template:
            template.holders.pop(worker.index, None)
        if not (template and template.shared):
            worker.load.templates.discard(name)

    def _fail_template(self, entry: Entry, message: str) -> None:
        """Edits that wait for it are computed in full."""
        template = self.templates.get(entry.id)
        if template is None:
            return
        template.entries.pop(entry.worker, None)
        if not template.is_held:
            template.state, template.message = "failed", message
        for parked in template.parked:
            if parked.worker == entry.worker:
                parked.run_dense()
        self._unpark(template, entry.worker)

    # numbers

    @property
    def num_waiting(self) -> int:
        return sum(entry.is_waiting for entry in self.entries.values())

    @property
    def num_running(self) -> int:
        return len(self.entries) - self.num_waiting

    def _works_of(self, orders: Sequence[Order]) -> list[Work]:
        """Pictures of one request are mostly one picture, which is hashed once."""
        facts = self.model_facts
        if facts is None:  # no worker has ever been ready: anything is as good
            return [Work(order.steps or 1, 1, 1) for order in orders]
        names: dict[tuple[object, ...], str] = {}
        works = []
        for order in orders:
            registering = self.registering_of(order)
            key = id(order.picture), order.tenant, registering.steps, registering.guidance
            if key not in names:
                names[key] = template_id(registering)
            height, width = working_size_of(*order.picture.shape[:2], facts.unit, facts.own_size)
            num_tokens = (height // facts.patch) * (width // facts.patch)
            num_masked = max(round(num_tokens * float(order.mask.mean())), 1)
            works.append(Work(registering.steps, num_tokens, num_masked, names[key]))
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

    def _all_processes(self) -> list[Process]:
        return [process for worker in self.workers for process in worker.processes.values()]


def can_reuse(order: Order) -> bool:
    """Whether activations would spare it anything."""
    return order.quality != "exact" and not order.mask.all()


def prepare_message(entry: Entry) -> tuple[wire.Prepare, list[wire.Frame]]:
    order = entry.edit
    wish = wire.Wish(
        prompt=order.prompt,
        negative_prompt=order.negative_prompt,
        seed=order.seed,
        steps=order.steps,
        guidance=order.guidance,
        true_guidance=order.true_guidance,
        strength=order.strength,
        feather=order.feather,
        quality=order.quality,
    )
    message = wire.Prepare(entry.id, entry.attempt, wish, order.picture.shape[:2])
    return message, wire.picture_frames(order.picture, order.mask)


def denoising(entry: Entry, template: wire.TemplateHead | None) -> wire.Denoising:
    assert entry.prepared is not None
    return wire.Denoising(
        id=entry.id,
        attempt=entry.attempt,
        job=entry.prepared.job,
        template=template,
        is_sure=entry.is_sure,
        num_partials=entry.edit.num_partials,
    )


def finish_message(
    entry: Entry, latents: wire.TensorHead, partial: int | None, frames: Sequence[wire.Frame]
) -> tuple[wire.Finish, list[wire.Frame]]:
    assert entry.prepared is not None
    order = entry.edit
    message = wire.Finish(
        id=entry.id,
        attempt=entry.attempt,
        latents=latents,
        grid=entry.prepared.job.grid,
        size=order.picture.shape[:2],
        feather=order.feather,
        output_format=order.output_format,
        output_compression=order.output_compression,
        partial=partial,
    )
    return message, [*frames, *wire.picture_frames(order.picture, order.mask)]

"""The cluster's front: it accepts edits, chooses their worker, and decides whether they reuse activations."""

import logging
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.edits import Edits
from instgenie.cluster.entries import ComputeMode, EditEntry
from instgenie.cluster.library import Library
from instgenie.cluster.messages import Send
from instgenie.cluster.orders import Order
from instgenie.cluster.placement import Placement, total_work
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.reporter import Reporter
from instgenie.cluster.templates import TemplateRecord
from instgenie.errors import ClosedError, QueueFullError
from instgenie.scheduling.predictor import Predictor
from instgenie.scheduling.router import Work
from instgenie.scheduling.terms import NO_DEADLINE, Standing, Terms
from instgenie.telemetry.logs import names_of

log = logging.getLogger(__name__)


class Place:
    """Places in the queue, taken for edits that are not yet submitted."""

    def __init__(self, front: "Front", num_edits: int, tenant: str) -> None:
        self._front = front
        self._num_edits = num_edits
        self._tenant = tenant
        front.reserved[tenant] += num_edits

    @property
    def is_held(self) -> bool:
        return self._num_edits > 0

    def release(self) -> None:
        """Give the places back; a second call does nothing."""
        self._front.reserved[self._tenant] -= self._num_edits
        self._num_edits = 0


class Front:
    def __init__(
        self,
        config: ClusterConfig,
        placement: Placement,
        library: Library,
        edits: Edits,
        reporter: Reporter,
        send: Send,
    ) -> None:
        self.config = config
        self.placement = placement
        self.library = library
        self.edits = edits
        self.reporter = reporter
        self.send = send
        self.reserved: Counter[str] = Counter()  # places of edits that are not yet submitted, by tenant
        self.predictor = Predictor()

    @property
    def num_reserved(self) -> int:
        return self.reserved.total()

    def reserve(self, num_edits: int, tenant: str = "") -> Place:
        """Take places for edits that will be submitted soon. Every accepted edit that is not in a batch counts, from
        here until it is answered."""
        num_waiting = self.num_reserved + self.edits.num_outside_batches
        if num_edits and num_waiting + num_edits > self.config.max_queue:
            raise QueueFullError(num_waiting, self.config.max_queue, self.retry_after)
        limit = self.config.max_queue_per_tenant
        if limit is not None and num_edits:
            entries = self.edits.entries.values()
            own = sum(not entry.is_running and entry.order.tenant == tenant for entry in entries)
            own += self.reserved[tenant]
            if own + num_edits > limit:
                raise QueueFullError(own, limit, self.retry_after, is_own=True)
        return Place(self, num_edits, tenant)

    def predict(self, orders: Sequence[Order], is_alone: bool = False) -> float:
        """Seconds until the edits of one request would be done, beside what is accepted or on an idle worker."""
        works = [self._checked(*pair) for pair in zip(orders, self.library.naming.works_of(orders), strict=True)]
        worker = self.placement.choose(works, self.library.holders(works[0].template))
        return self._predict(orders[0], works, worker, is_alone)

    def _predict(self, order: Order, works: Sequence[Work], worker: Worker, is_alone: bool = False) -> float:
        """The same on one worker. Only edits that the policy lets go first are in the way of those with terms of their
        own; the others are taken to wait for all."""
        load = worker.load
        terms = Terms(order.deadline, order.priority, order.tenant, sys.maxsize)
        if is_alone:
            load = load.idle
        elif terms.deadline != NO_DEADLINE or terms.priority:
            work, process = total_work(works), worker.denoiser
            mine = list(worker.edits.values())
            own = Standing(terms, self.predictor.predict(work, load.idle), work=load.added_seconds(work))
            ranks = worker.policy.ranks([*map(process.claim_of, mine), own], time.monotonic())
            before = [entry.id for entry, rank in zip(mine, ranks, strict=False) if rank < ranks[-1]]
            load = load.only(before)
        return self.predictor.predict(total_work(works), load)

    def accept(self, orders: Sequence[Order], place: Place | None = None) -> list[EditEntry]:
        """Queue the edits of one request; they share a worker, and a batch if it has room. They take the place
        of the request, if one was reserved."""
        place = place or self.reserve(len(orders), orders[0].tenant)
        place.release()
        group: list[EditEntry] = []
        works = [self._checked(*pair) for pair in zip(orders, self.library.naming.works_of(orders), strict=True)]
        for order, work in zip(orders, works, strict=True):
            may_store = order.may_store and self.config.auto_register
            entry = EditEntry(
                id=uuid.uuid4().hex,
                order=order,
                work=work,
                group=group,
                may_own=work.own_share < 1,
                may_store=may_store,
            )
            group.append(entry)
        worker = self.placement.home_of(orders[0]) or self.placement.choose(
            works, self.library.holders(works[0].template)
        )
        predicted = self._predict(orders[0], works, worker)
        entries = list(group)
        for entry in entries:
            log.info("accepted", extra=names_of(entry) | {"worker": worker.index})
            entry.predicted = predicted
            self.reporter.accepted(entry)
            self._decide(entry, worker)
            self.edits.entries[entry.id] = entry
            self.placement.settle(entry, worker)
            self._announce(entry)
            self.placement.put(entry)
        return entries

    def cancel(self, entry: EditEntry) -> None:
        """Drop an edit at whatever stage it is. A process that works on a part of it is told so."""
        holder = self.placement.process_of(entry)
        if holder.abandon(entry):
            self.send(holder, wire.Cancel(entry.id))
        finisher = self.placement.workers[entry.worker].processes.get("finish")
        if finisher and finisher.is_ready and finisher is not holder and entry.order.num_partials:
            self.send(finisher, wire.Cancel(entry.id))  # partial pictures
        self.edits.cancel(entry)

    def on_dropped(self, process: Process, message: wire.Dropped, frames: list[wire.Frame]) -> None:
        process.leaving.discard(message.id)

    def forget(self, template: TemplateRecord) -> None:
        """Delete a template. Edits that do not yet use it compute every token."""
        for entry in list(self.edits.entries.values()):
            if entry.work.template == template.id:
                entry.may_store = False  # its picture would come back
            if entry.template == template.id and not entry.is_running:
                self.edits.compute_in_full(entry, "its template was deleted")
        self.library.forget(template)

    def _checked(self, order: Order, work: Work) -> Work:
        """The work, with the note whether it must use activations: they are known to exist, or the client insists."""
        insists = order.wish.reuse == "template"
        if insists and work.template is None:
            raise ClosedError("the model is not known yet, so its templates are not either")
        own_share = work.own_share if self.config.reuse else 1.0
        return replace(work, must_reuse=insists or self.library.is_ready(work.template), own_share=own_share)

    def _decide(self, entry: EditEntry, worker: Worker) -> None:
        """Decide whether an edit uses its template's activations, or leave it to the worker to look for them. Whether a
        template is used does not depend on the worker: one that lacks the activations of a ready template copies or
        registers them before it runs the edit."""
        name = entry.work.template
        if name is None:
            entry.run_dense(entry.order.obstacle or "the model was not known yet")
            worker.load.expect(entry.work)
            return
        if entry.work.must_reuse or worker.load.tier_of(entry.work):
            entry.mode = ComputeMode.CACHED
        elif self.library.may_be_below(name):
            entry.mode = ComputeMode.UNDECIDED
        else:
            entry.run_dense(self.library.why_not(name))
            self.reporter.cache_query(entry)
        worker.load.expect(entry.work)

    def _announce(self, entry: EditEntry) -> None:
        """Have the activations and the LoRAs loaded now if the edit is among those its worker takes next."""
        worker = self.placement.workers[entry.worker]
        has_room = worker.denoiser.is_ready and worker.load.num_edits <= worker.denoiser.max_held
        if has_room and entry.order.wish.loras:
            self.send(worker.denoiser, wire.FetchLoras(entry.order.wish.loras))
        if has_room and (head := self.library.naming.head(entry)):
            peers = self.library.peers.addresses(entry.template, entry.worker)
            self.send(worker.denoiser, wire.Fetch(entry.id, head, peers))

    @property
    def retry_after(self) -> float:
        """Seconds until the first worker has done all its work; of many workers, the first of some."""
        loads = self.placement.ready_loads or [worker.load for worker in self.placement.workers]
        return max(min(load.seconds for load in self.placement.router.sample(loads)), 1.0)

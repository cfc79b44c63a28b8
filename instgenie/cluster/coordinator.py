"""The coordinator of a cluster: every order, message, start and death passes through it. It hands each to the part that
knows what to do, and then sends whatever can be sent. Knows no socket.

    front      accepts and cancels edits
    stages     prepare, gather, denoise, finish
    recovery   deaths and restarts of processes
    library    templates and their registrations
    unasked    registrations of pictures that come back
    archive    templates in tiers that outlive the cluster
    deposits   requests and answers that other fronts can take up
    neighbours templates of other fronts
    sharing    workers that other fronts use as well
    reporter   events for clients, observers and traces

An edit's `ComputeMode` is decided once: when the edit is accepted, if the cluster knows about its template's
activations; otherwise by its worker, which looks for them on disk and beyond. From then on the picture is the same
wherever and however often the edit is run. A worker that lacks the activations of such an edit copies them from one
that has them, or registers them first; the edit is computed in full only if that fails, or if the activations fit
nowhere.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from instgenie.cluster import wire
from instgenie.cluster.archive import Archive
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.deposits import Deposits
from instgenie.cluster.edits import Edits
from instgenie.cluster.entries import EditEntry, Entry, Ticket
from instgenie.cluster.front import Front, Place
from instgenie.cluster.library import Library
from instgenie.cluster.messages import Send
from instgenie.cluster.naming import Naming
from instgenie.cluster.neighbours import Neighbours
from instgenie.cluster.orders import Order, TemplateOrder
from instgenie.cluster.placement import Placement
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.recovery import Recovery
from instgenie.cluster.reporter import Reporter
from instgenie.cluster.sharing import Sharing
from instgenie.cluster.stages import Stages
from instgenie.cluster.templates import TemplateRecord
from instgenie.cluster.unasked import Unasked
from instgenie.telemetry.logs import names_of

log = logging.getLogger(__name__)


class Coordinator:
    def __init__(self, config: ClusterConfig, workers: Sequence[Worker], send: Send) -> None:
        self.naming = Naming(workers, config.loras)
        self.placement = Placement(config.policy, workers)
        self.reporter = Reporter()
        self.library = Library(config, self.naming, self.placement, send)
        self.archive = Archive(self.library)
        self.neighbours = Neighbours(self.library, self.archive)
        self.edits = Edits(self.placement, self.library, self.reporter)
        self.front = Front(config, self.placement, self.library, self.edits, self.reporter, send)
        self.edits.on_finished = self.front.predictor.learn
        self.unasked = Unasked(config, self.library)
        self.stages = Stages(self.placement, self.library, self.unasked, self.edits, self.reporter, send)
        self.recovery = Recovery(self.placement, self.library, self.archive, self.edits)
        self.sharing = Sharing(workers, config.worker_timeout, send)
        self.deposits = Deposits(workers, send)
        self._handlers: dict[type, Callable[[Process, Any, list[wire.Frame]], None]] = {
            wire.JobFailed: self.stages.on_failed,
            wire.Dropped: self.front.on_dropped,
            wire.Prepared: self.stages.on_prepared,
            wire.Priced: self.stages.on_priced,
            wire.TierFound: self.stages.on_found,
            wire.Missing: self.stages.on_missing,
            wire.Joined: self.stages.on_joined,
            wire.Preempted: self.stages.on_preempted,
            wire.BatchStepped: self.stages.on_stepped,
            wire.Glimpsed: self.stages.on_glimpsed,
            wire.Denoised: self.stages.on_denoised,
            wire.Painted: self.stages.on_painted,
            wire.Collected: self.deposits.on_collected,
            wire.Registered: self.library.on_registered,
            wire.Kept: self.library.on_kept,
            wire.Fetched: self.stages.on_fetched,
            wire.LorasKept: self.stages.on_loras_kept,
            wire.Forgotten: self.neighbours.on_forgotten,
            wire.EditCounted: self.unasked.on_counted,
            wire.Announced: self.neighbours.on_announced,
            wire.Foreign: self.sharing.on_foreign,
            wire.Listed: self.archive.on_listed,
            wire.Recalled: self.archive.on_recalled,
        }

    # clients

    def accept(self, orders: Sequence[Order], place: Place | None = None) -> list[Ticket]:
        """Accept the edits of one request; they share a worker, and a batch as far as there is room."""
        tickets = [Ticket(entry, self.cancel) for entry in self.front.accept(orders, place)]
        self.pump()
        return tickets

    @property
    def has_edits(self) -> bool:
        """True if an edit is not yet answered, or will soon be submitted."""
        return bool(self.edits.entries or self.front.num_reserved)

    def cancel(self, entry: EditEntry) -> None:
        if self.edits.entries.get(entry.id) is entry:
            self.front.cancel(entry)
            self.pump()

    def register(self, order: TemplateOrder) -> TemplateRecord:
        known = self.library.templates.get(order.id)
        is_news = known is not None and not known.is_asked_for
        template = self.library.ask_for(order)
        if is_news and not template.entries:
            self.archive.keep(template)
        self.pump()
        return template

    def forget(self, template: TemplateRecord) -> None:
        self.front.forget(template)
        self.pump()

    # processes

    def handle(self, process: Process, message: wire.AnyMessage, frames: list[wire.Frame]) -> None:
        self._handlers[type(message)](process, message, frames)
        if not isinstance(message, wire.BatchStepped) or process.queue:
            process.touch()  # after a step, the most frequent message, only the order of what waits may be another
        self.pump()

    def ready(self, process: Process, facts: wire.ModelFacts, digest: str) -> None:
        self.recovery.ready(process, facts, digest)
        self.pump()

    def died(self, process: Process) -> None:
        self.sharing.lose(process)
        self.recovery.died(process)
        self.pump()

    # sending

    def pump(self) -> None:
        """Send what can be sent, and tell waiting clients their positions. Only workers are looked at for which
        something has changed: among thousands, a message is about one."""
        self.library.registrations.release()
        touched: set[int] = set()
        while changed := self.placement.take_changed():
            touched |= {process.worker for process in changed}
            taken = [(process, group) for process in changed for group in process.take()]
            for process, entries in taken:  # one may put another entry into a queue
                self._try_dispatch(process, entries)
        for worker in sorted(touched):
            self.reporter.positions(self.placement.workers[worker].edits.values(), self.stages.seconds_left)

    def _try_dispatch(self, process: Process, entries: Sequence[Entry]) -> None:
        try:
            self.stages.dispatch(process, entries)
        except Exception:
            log.exception("not sent", extra=names_of(entries[0]))
            for entry in entries:
                self.edits.fail(entry, "internal", "the edit could not be sent to a worker")

"""The edits that are accepted and not yet answered: gathered into their groups, answered, failed, cancelled."""

import logging
import time
from collections.abc import Callable

from instgenie.cluster.entries import EditEntry, Entry, TemplateEntry
from instgenie.cluster.library import Library
from instgenie.cluster.orders import Event, Facts, Failed, FailureKind, Finished
from instgenie.cluster.placement import Placement
from instgenie.cluster.reporter import Reporter
from instgenie.cluster.shelf import drop_failed
from instgenie.telemetry.logs import names_of

log = logging.getLogger(__name__)


class Edits:
    def __init__(self, placement: Placement, library: Library, reporter: Reporter) -> None:
        self.placement = placement
        self.library = library
        self.reporter = reporter
        self.entries: dict[str, EditEntry] = {}
        self._num_in_batches = 0
        self.on_finished: Callable[[float, float], None] = lambda predicted, seconds: None

    @property
    def num_waiting(self) -> int:
        return sum(entry.is_waiting for entry in self.entries.values())

    @property
    def num_outside_batches(self) -> int:
        """Edits that wait for a stage, or are being prepared or finished."""
        return len(self.entries) - self._num_in_batches

    @property
    def num_running(self) -> int:
        return len(self.entries) - self.num_waiting

    def gather(self, group: list[EditEntry]) -> None:
        """Send a group to be denoised together, once each of its edits is prepared."""
        if any(entry.stage == "prepare" for entry in group):
            return
        gathered = [entry for entry in group if entry.stage == "gather"]
        for entry in gathered:
            entry.move("denoise")
            self.placement.settle(entry, self.placement.workers[gathered[0].worker])
            self.placement.put(entry)

    def join_batch(self, entry: EditEntry, plan: tuple[bool, ...]) -> None:
        self._num_in_batches += not entry.is_running
        entry.is_running, entry.plan, entry.joined_at = True, plan, time.monotonic()
        self.placement.workers[entry.worker].load.arrived(entry.work.template)
        self.reporter.waited(entry, "denoise")
        self.reporter.joined(entry)

    def leave_batch(self, entry: EditEntry) -> None:
        if entry.is_running:
            entry.is_running = False
            self._num_in_batches -= 1
            self.reporter.left(entry)

    def finish(self, entry: EditEntry, picture: bytes, facts: Facts, seconds: float) -> None:
        log.info("finished", extra=names_of(entry) | {"seconds": round(seconds, 3), "worker": entry.worker})
        self.on_finished(entry.predicted, seconds)
        self.reporter.finished(facts, seconds)
        self._answer(entry, Finished(picture, facts))

    def fail(self, entry: Entry, kind: FailureKind, message: str, param: str | None = None) -> None:
        """Fail an edit, or a registration."""
        log.warning("failed", extra=names_of(entry) | {"kind": kind, "reason": message})
        match entry:
            case TemplateEntry():
                self._fail_template(entry, message)
            case EditEntry():
                self.reporter.failed(kind)
                self._answer(entry, Failed(kind, message, param))

    def _fail_template(self, entry: TemplateEntry, message: str) -> None:
        """Fail a registration. Edits that wait for it and find the template nowhere else are computed in full."""
        for edit in self.library.fail(entry, message):
            self.compute_in_full(edit, f"its template could not be registered: {message}")
            if edit.id in self.entries:
                self.library.unpark(self.library.templates[entry.id], edit)
        drop_failed(self.library.templates, entry.id)

    def compute_in_full(self, entry: EditEntry, why: str) -> None:
        """Let an edit do without activations, or fail it if its client insists on them."""
        if entry.must_not_run_dense:
            self.fail(entry, "no_reuse", why)
        else:
            entry.run_dense(why)

    def cancel(self, entry: EditEntry) -> None:
        self.reporter.cancelled()
        self._drop(entry)

    def _answer(self, entry: EditEntry, event: Event) -> None:
        entry.events.put_nowait(event)
        self._drop(entry)

    def _drop(self, entry: EditEntry) -> None:
        self.entries.pop(entry.id, None)
        self.leave_batch(entry)
        self.placement.remove(entry)
        self.placement.workers[entry.worker].load.arrived(entry.work.template)
        self.placement.process_of(entry).remove(entry)
        self.library.drop(entry)
        entry.group.remove(entry)
        self.gather(entry.group)
        self.reporter.ended(entry)

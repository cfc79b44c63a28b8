"""Deaths and returns of processes. Their entries are run again; an entry that keeps killing processes fails alone."""

import logging

from instgenie.cluster import wire
from instgenie.cluster.archive import Archive
from instgenie.cluster.edits import Edits
from instgenie.cluster.entries import MAX_DEATHS, EditEntry, Entry
from instgenie.cluster.library import Library
from instgenie.cluster.moving import move_away
from instgenie.cluster.peers import host_of
from instgenie.cluster.placement import Placement
from instgenie.cluster.processes import Process, are_broken
from instgenie.telemetry.logs import names_of

log = logging.getLogger(__name__)


class Recovery:
    def __init__(self, placement: Placement, library: Library, archive: Archive, edits: Edits) -> None:
        self.placement = placement
        self.workers = placement.workers
        self.library = library
        self.archive = archive
        self.edits = edits

    def ready(self, process: Process, facts: wire.ModelFacts, digest: str) -> None:
        """Bring a process into use. Entries that wait for processes which are down may go to those that are up."""
        self.library.naming.model_facts = facts
        worker = self.workers[process.worker]
        worker.digests[process.role] = digest
        worker.has_lost_node &= not worker.is_ready
        if process.role == "denoise":
            worker.host = host_of(worker.denoiser.peer_address)
            worker.load.loras.hold(())
            self.library.forgetting.send_all(worker)
        if worker.denoiser.is_ready:
            self.archive.ask(worker)
        for other in self.placement.processes:
            if not other.is_ready:
                _, queue = other.empty()
                for entry in queue:
                    self.placement.put(entry)
        for other_worker in self.workers:
            if other_worker.is_away:
                move_away(self.library, other_worker)

    def died(self, process: Process) -> None:
        """Queue the entries of a dead process again, and fail those that cannot be run."""
        held, queue = process.empty()
        if process.state == "failed":
            queue += self.library.registrations.take_all(process.worker)
        if process.role == "denoise":
            worker = self.workers[process.worker]
            self.archive.lose(worker)
            self.library.lose_memory(worker)
        for entry in held:
            facts = {"attempt": entry.attempt, "num_deaths": entry.num_deaths}
            log.warning("run again", extra=names_of(entry) | facts)
            if isinstance(entry, EditEntry):
                self.edits.leave_batch(entry)
            entry.lose()
        for entry in held + queue:
            if entry.num_deaths >= MAX_DEATHS:
                self.edits.fail(entry, "crashed", f"{MAX_DEATHS} processes died while they worked on it")
            elif process.is_broken and self._is_lost(entry):
                self.edits.fail(entry, "unavailable", process.message)
            else:
                self.placement.put(entry)
        if self.workers[process.worker].is_away:
            move_away(self.library, self.workers[process.worker])

    def _is_lost(self, entry: Entry) -> bool:
        """True if no worker can run it. A template is tied to its worker; an edit may go to any other."""
        return not isinstance(entry, EditEntry) or are_broken(self.workers)

    def give_up(self) -> None:
        """Fail all edits, since the cluster stops."""
        for entry in list(self.edits.entries.values()):
            self.edits.fail(entry, "shutting_down", "the server stopped before the edit was done")

"""Templates that other fronts have registered or deleted on workers that they share with this one."""

from instgenie.cluster import wire
from instgenie.cluster.archive import Archive
from instgenie.cluster.library import Library
from instgenie.cluster.processes import Process
from instgenie.cluster.templates import TemplateRecord


class Neighbours:
    def __init__(self, library: Library, archive: Archive) -> None:
        self.library, self.archive = library, archive

    def on_announced(self, process: Process, message: wire.Announced, frames: list[wire.Frame]) -> None:
        """Take up templates that other fronts had registered. `Kept` messages tell where they are."""
        for listing in message.templates:
            name = listing.template.id
            known = self.library.templates.get(name)
            if name not in self.library.forgetting and (known is None or known.state == "failed"):
                self.archive.add(name, listing, self.library.workers[process.worker].host)
            if template := self.library.templates.get(name):
                template.is_asked_for |= listing.is_asked_for

    def on_forgotten(self, process: Process, message: wire.Forgotten, frames: list[wire.Frame]) -> None:
        """A template is deleted: this front asked for that, or another one did."""
        template = self.library.templates.get(message.template)
        if template and template.id not in self.library.forgetting and not template.entries:
            self._drop(template)
        self.library.forgetting.on_forgotten(process, message, frames)

    def _drop(self, template: TemplateRecord) -> None:
        del self.library.templates[template.id]
        self.library.peers.forget(template)
        for worker in self.library.workers:
            worker.load.templates.pop(template.id, None)
        for parked in list(template.parked):
            self.library.unpark(template, parked)

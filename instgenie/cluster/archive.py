"""Templates in tiers that outlive a cluster: which there are, and their pictures. The workers look; the library keeps
what they find."""

import asyncio

from instgenie.cluster import wire
from instgenie.cluster.library import Library
from instgenie.cluster.orders import TemplateOrder
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.templates import TemplateRecord
from instgenie.errors import ClosedError
from instgenie.types import Pixels


class Archive:
    def __init__(self, library: Library) -> None:
        self.library = library
        self._listed: set[str] = set()  # models whose templates are known
        self._listing: dict[str, int] = {}  # the worker that was asked, for each further model
        self._recalls: dict[tuple[int, str], asyncio.Future[Pixels | None]] = {}  # by worker and template

    def ask(self, worker: Worker) -> None:
        """Ask for the templates of a worker's model, once per model."""
        config, model = self.library.config, worker.identity
        is_lasting = config.reuse and config.cache.is_lasting
        if is_lasting and model and model not in {*self._listed, *self._listing}:
            self._listing[model] = worker.index
            self.library.send(worker.denoiser, wire.List(model))

    def on_listed(self, process: Process, message: wire.Listed, frames: list[wire.Frame]) -> None:
        self._listing.pop(message.model, None)
        self._listed.add(message.model)
        for listing in message.templates:
            name = listing.template.id
            if name not in self.library.templates and name not in self.library.forgetting:
                self.add(name, listing, self.library.workers[process.worker].host)
        for head in message.forgotten:
            if head.id not in self.library.templates:
                self.library.forgetting.add(self.library.workers[process.worker], head)

    def add(self, name: str, listing: wire.Listing, host: str) -> None:
        """Add a template that a worker of a host has listed to the library. An incomplete one is shown, so that it can
        be forgotten; an edit of its picture registers the rest."""
        head = listing.template
        order = TemplateOrder(head.tenant, listing.picture, head.steps, head.guidance, head.picture, None)
        template = self.library.templates[name] = TemplateRecord(name, order)
        template.num_registered_steps = listing.num_registered_steps
        if listing.num_registered_steps == head.steps:
            template.state = "ready"
            template.keep_below(host, listing.tier_bytes)
            self.library.tell_router(template)
        else:
            template.fail("its registration was interrupted: register it again")

    def keep(self, template: TemplateRecord) -> None:
        """Tell the workers that a client now asks for a template which was registered unasked: it does not expire."""
        for worker in self.library.workers:
            head = self.library.naming.head_of(template.id, template.order, worker)
            if head and worker.denoiser.is_ready:
                self.library.send(worker.denoiser, wire.Keep(head))

    def recall(self, template: TemplateRecord) -> asyncio.Future[Pixels | None]:
        """Read a template's picture from the tier that holds its activations; None if it is no longer there."""
        for worker in self.library.workers:
            head = self.library.naming.head_of(template.id, template.order, worker)
            if head and worker.denoiser.is_ready:
                place = worker.index, template.id
                if place not in self._recalls:
                    self._recalls[place] = asyncio.get_running_loop().create_future()
                    self.library.send(worker.denoiser, wire.Recall(head))
                return self._recalls[place]
        raise ClosedError("no worker can look for the template's picture")

    def on_recalled(self, process: Process, message: wire.Recalled, frames: list[wire.Frame]) -> None:
        waiting = self._recalls.pop((process.worker, message.template), None)
        if waiting and not waiting.done():
            waiting.set_result(wire.read_picture(frames[0], message.size) if message.size else None)

    def lose(self, worker: Worker) -> None:
        """Abandon the questions that a worker did not answer before it died."""
        self._listing = {model: index for model, index in self._listing.items() if index != worker.index}
        for place in [place for place in self._recalls if place[0] == worker.index]:
            self._recalls.pop(place).set_exception(ClosedError("the worker that looked for the picture stopped"))

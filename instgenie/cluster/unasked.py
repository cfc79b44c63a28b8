"""Registrations that no client asked for: of pictures that come back. Knows which pictures were edited, and when.

Fronts that share workers see only a part of the edits each. So one worker counts for all of them: the template's own,
which every front finds by the template's id. A front asks it after an edit that its own count does not settle.
"""

from bisect import bisect_left
from collections import OrderedDict

from instgenie.cluster import wire
from instgenie.cluster.clerk import name_of
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import ComputeMode, EditEntry
from instgenie.cluster.library import Library
from instgenie.cluster.orders import TemplateOrder
from instgenie.cluster.popularity import Popularity
from instgenie.cluster.processes import Process, Worker

MAX_UNASKED = 4  # registrations in progress that no client asked for
MAX_ASKED = 32  # pictures that wait for the count of other fronts' edits


class Unasked:
    def __init__(self, config: ClusterConfig, library: Library) -> None:
        self.config, self.library = config, library
        self.popularity = Popularity(config.register_after, config.register_window)
        self._asked: OrderedDict[str, tuple[TemplateOrder, Worker]] = OrderedDict()  # by template; the count is awaited

    def consider(self, entry: EditEntry) -> None:
        """Register the picture of a finished edit that found no activations, if the picture has come back, so that the
        next edit finds some."""
        naming = self.library.naming
        may_store = self.config.reuse and entry.may_store
        is_wanted = may_store and entry.order.can_reuse and naming.model_facts is not None
        if entry.mode not in (ComputeMode.DENSE, ComputeMode.OWN) or not is_wanted:
            return
        order, worker = naming.template_order_of(entry.order), self.library.workers[entry.worker]
        name = entry.work.template or order.id
        request = name_of(entry.order.key) or entry.request_id  # a key is that of the same request at any front
        if self.popularity.note(name, request):
            self._register(name, order, worker)
        elif counter := self._counter(name):
            self._asked[name] = order, worker
            if len(self._asked) > MAX_ASKED:
                self._asked.popitem(last=False)
            self.library.send(counter.denoiser, wire.CountEdit(name, request))

    def on_counted(self, process: Process, message: wire.EditCounted, frames: list[wire.Frame]) -> None:
        asked = self._asked.pop(message.template, None)
        if asked and message.has_come_back:
            self._register(message.template, *asked)

    def _counter(self, name: str) -> Worker | None:
        """The worker that counts a template's edits for all fronts; None if there is no other front. It is the next
        one that is ready, so that few templates move when a worker comes or goes."""
        ready = self.library.placement.ready_loads
        if not ready:
            return None
        place = int(name[:8], 16) % len(self.library.workers)
        load = ready[bisect_left(ready, place, key=lambda load: load.worker) % len(ready)]
        worker = self.library.workers[load.worker]
        return worker if worker.num_fronts > 1 else None

    def _register(self, name: str, order: TemplateOrder, worker: Worker) -> None:
        templates = self.library.templates
        known = templates.get(name)
        is_under_way = known is not None and (known.state == "ready" or bool(known.entries))
        num_unasked = sum(not template.is_asked_for and bool(template.entries) for template in templates.values())
        if not is_under_way and num_unasked < MAX_UNASKED and self.library.retries.may_try(name):
            self.library.register_on(self.library.learn(name, order), worker)

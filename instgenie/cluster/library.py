"""The templates that a cluster knows, and their registrations. Knows no edit except those that wait for a template.

A worker that lacks a template finds it in a shared tier or copies it from a worker that has it; otherwise it registers
the template. A template that a client asked for is registered again when it is lost; others are dropped.
"""

import time
from collections.abc import Sequence

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import EditEntry, PreparedJob, TemplateEntry
from instgenie.cluster.forgetting import Forgetting
from instgenie.cluster.messages import Send, prepare_template_message, register_message
from instgenie.cluster.naming import Naming
from instgenie.cluster.orders import TemplateOrder
from instgenie.cluster.peers import Peers
from instgenie.cluster.placement import Placement
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.quota import check_quota
from instgenie.cluster.registrations import Registrations
from instgenie.cluster.retries import Retries
from instgenie.cluster.shelf import drop_failed, drop_pictures
from instgenie.cluster.templates import SHARED, TemplateRecord
from instgenie.scheduling.router import Work


class Library:
    def __init__(self, config: ClusterConfig, naming: Naming, placement: Placement, send: Send) -> None:
        self.config = config
        self.naming = naming
        self.placement = placement
        self.workers = placement.workers
        self.send = send
        self.templates: dict[str, TemplateRecord] = {}
        self.forgetting = Forgetting(placement.workers, send)
        self.retries = Retries()
        self.registrations = Registrations(placement)
        self.peers = Peers(placement.workers, self.templates)

    # templates

    def ask_for(self, order: TemplateOrder) -> TemplateRecord:
        """Register a template for a client, unless it is there or on its way. Raises if the tenant has too many."""
        name = order.id
        if not (name in self.templates and self.templates[name].is_asked_for):
            check_quota(self.templates.values(), order.tenant, self.config.max_templates)
        template = self.learn(name, order, is_asked_for=True)
        if template.state == "failed" or not (template.is_held or template.entries):
            self.register_on(template, self.placement.choose([Work(order.steps, 0, 0, name)]))
        return template

    def meet(self, name: str, entry: EditEntry) -> None:
        """Note that an edit has found a template's activations, which may be older than the cluster."""
        is_new = name not in self.templates
        template = self.learn(name, self.naming.template_order_of(entry.order))
        if is_new:
            template.state, template.num_registered_steps = "ready", template.order.steps
        self.workers[entry.worker].load.templates.setdefault(name, "host")  # the edit brought it into memory

    def holders(self, name: str | None) -> Sequence[int]:
        """Workers that have the template's activations in memory."""
        template = self.templates.get(name or "")
        return list(template.holders) if template else ()

    def is_ready(self, name: str | None) -> bool:
        """True if the template's activations are known to be somewhere, or are being registered again. A worker that
        lacks them registers them."""
        template = self.templates.get(name or "")
        return template is not None and (template.state == "ready" or template.is_lost)

    def why_not(self, name: str) -> str:
        """Why an edit of a template that is not ready is computed in full."""
        template = self.templates.get(name)
        if not self.config.reuse:
            return "the server runs without reuse"
        has_failed = template.state == "failed" if template else not self.retries.may_try(name)
        if not has_failed and not (template and template.entries):
            return "no activations are registered for the picture with these steps and this guidance"
        return f"the registration of its template {'failed' if has_failed else 'is not yet finished'}"

    def may_be_below(self, template: str) -> bool:
        """True if a tier that outlives the cluster may hold activations that the cluster does not know of."""
        is_known = template in self.templates or template in self.forgetting
        return self.config.reuse and self.config.cache.is_lasting and not is_known

    def learn(self, name: str, order: TemplateOrder, is_asked_for: bool = False) -> TemplateRecord:
        """Get or create the record of a template, and give it the picture."""
        template = self.templates.setdefault(name, TemplateRecord(name, order))
        template.order, template.used_at = order, time.monotonic()
        template.is_asked_for |= is_asked_for
        drop_pictures(self.templates.values(), self.config.picture_bytes)
        return template

    # registrations

    def register_on(self, template: TemplateRecord, worker: Worker, is_urgent: bool = False) -> None:
        if worker.index in template.entries:
            self._hurry(template.entries[worker.index], is_urgent)
            return
        self.forgetting.cancel(template.id)
        entry = TemplateEntry(id=template.id, order=template.order, worker=worker.index, is_urgent=is_urgent)
        template.entries[worker.index] = entry
        if not template.is_held:
            template.state = "queued"
        self.registrations.put(entry)

    def dispatch(self, process: Process, entry: TemplateEntry) -> None:
        if entry.stage == "prepare":
            self.send(process, *prepare_template_message(entry))
            return
        head = self.naming.head_of(entry.id, entry.order, self.workers[entry.worker])
        assert head is not None
        is_asked_for = entry.id in self.templates and self.templates[entry.id].is_asked_for
        self.send(process, *register_message(entry, head, self.config.cache.is_lasting, is_asked_for))

    def prepared(self, entry: TemplateEntry, job: PreparedJob) -> None:
        entry.prepared = job
        entry.move("denoise")
        self.placement.put(entry)

    def _hurry(self, entry: TemplateEntry, is_urgent: bool) -> None:
        """Tell a worker that an edit now waits for a registration it already has."""
        is_news = is_urgent and not entry.is_urgent
        entry.is_urgent |= is_urgent
        if is_news:
            self.registrations.hurry(entry)
        process = self.placement.process_of(entry)
        if is_news and entry.stage == "denoise" and entry.id in process.held:
            self.dispatch(process, entry)

    def fail(self, entry: TemplateEntry, message: str) -> Sequence[EditEntry]:
        """End a registration that failed. The edits that wait for it go to another worker that has the template.
        Returns those that cannot, which are released by `unpark`."""
        template = self.templates.get(entry.id)
        if template is None:
            return ()
        template.entries.pop(entry.worker, None)
        self.retries.failed(template.id)
        if not template.is_held:
            template.fail(message)
        stuck = [parked for parked in template.parked if parked.worker == entry.worker]
        if not self._other_holders(template, entry.worker):
            return stuck
        for parked in stuck:
            template.parked.remove(parked)
            self._send_to_holder(template, parked)
        return ()

    # edits that wait for a template

    def park(self, entry: EditEntry) -> None:
        """Hold back an edit until its worker has registered the activations it must use. If a registration of the
        template failed a moment ago, the edit goes to a worker that has it."""
        assert entry.template is not None
        self.placement.process_of(entry).remove(entry)
        template = self.learn(entry.template, self.naming.template_order_of(entry.order))
        if not self.retries.may_try(template.id) and self._other_holders(template, entry.worker):
            self._send_to_holder(template, entry)
            return
        entry.move("park")
        entry.num_parks += 1
        template.parked.append(entry)
        self.register_on(template, self.workers[entry.worker], is_urgent=True)

    def _other_holders(self, template: TemplateRecord, worker: int) -> list[Worker]:
        """Workers other than this one that can run an edit of the template."""
        holders = [self.workers[index] for index in template.holders if index != worker]
        return [holder for holder in holders if holder.is_ready]

    def _send_to_holder(self, template: TemplateRecord, entry: EditEntry) -> None:
        """Move an edit to the least busy of the workers that have its template."""
        holders = self._other_holders(template, entry.worker)
        self.placement.settle(entry, min(holders, key=lambda worker: worker.load.seconds))
        entry.move("denoise")
        self.placement.put(entry)

    def drop(self, entry: EditEntry) -> None:
        """Remove an edit that no longer waits."""
        template = self.templates.get(entry.template or "")
        if template and entry in template.parked:
            template.parked.remove(entry)

    def unpark(self, template: TemplateRecord, entry: EditEntry) -> None:
        """Let an edit go on that waited for a template."""
        template.parked.remove(entry)
        entry.move("denoise")
        self.placement.put(entry)

    # reports of workers

    def on_registered(self, process: Process, message: wire.Registered, frames: list[wire.Frame]) -> None:
        template = self.templates.get(message.id)
        if template is None or process.holding(message.id, message.attempt) is None:
            return
        if not template.is_held:
            template.num_registered_steps = message.num_registered_steps
            template.state = "registering"
        if message.num_registered_steps == message.num_steps:
            process.take_back(message.id, message.attempt)
            template.entries.pop(process.worker, None)
            template.state, template.num_registered_steps, template.is_lost = "ready", message.num_steps, False
            self.retries.succeeded(template.id)
            template.keep_in_memory(process.worker, message.tier_bytes)
            worker = self.workers[process.worker]
            tier = template.tier_at(worker.index, worker.host) or "disk"  # provisional: the next Kept has the tiers
            worker.load.templates[template.id] = tier
            self.peers.update(template)
            for entry in [entry for entry in template.parked if entry.worker == process.worker]:
                self.unpark(template, entry)

    def on_kept(self, process: Process, message: wire.Kept, frames: list[wire.Frame]) -> None:
        self.workers[process.worker].tier_bytes = message.tier_bytes
        template = self.templates.get(message.template or "")
        if template is None:
            return
        worker = self.workers[process.worker]
        is_news_to_others = template.keep(worker.index, worker.host, message.template_bytes)
        self.tell_router(template, None if is_news_to_others else worker)
        if not (template.is_held or template.entries or template.parked):
            reason = "were evicted to make room for others, expired or could not be written"
            template.fail(f"its activations {reason}: register it again")
            drop_failed(self.templates, template.id)

    def lacks(self, worker: int, name: str) -> bool:
        """Note that a worker does not find a template, though others may. Return whether the template is known."""
        template = self.templates.get(name)
        if template:
            is_news_to_others = template.keep(worker, self.workers[worker].host, {})
            self.peers.fail(template, worker)
            self.tell_router(template, None if is_news_to_others else self.workers[worker])
        return template is not None

    def tell_router(self, template: TemplateRecord, worker: Worker | None = None) -> None:
        """Update the tier of a template in the load of each worker, or of the one for which it has changed."""
        for one in self.workers if worker is None else [worker]:
            update_load(one, template)
        self.peers.update(template)

    # loss

    def lose_memory(self, worker: Worker) -> None:
        """Note that a worker's denoise process died, and with it the activations in its memory."""
        worker.tier_bytes = {tier: num for tier, num in worker.tier_bytes.items() if tier in SHARED}
        worker.load.link.drop(worker.index)
        for name in list(worker.load.templates):
            template = self.templates.get(name)
            if template is None:
                worker.load.templates.pop(name, None)
                continue
            template.holders.pop(worker.index, None)
            self.tell_router(template, worker)
            if template.is_held:
                continue
            if template.is_asked_for and template.order.picture is None:
                template.fail("its activations were lost, and so was its picture: register it again")
            elif template.is_asked_for:
                template.num_registered_steps, template.is_lost = 0, self.is_ready(name)
                self.register_on(template, worker)
            elif not (template.entries or template.parked):
                del self.templates[name]

    def forget(self, template: TemplateRecord) -> None:
        """Delete a template from all tiers of all workers."""
        del self.templates[template.id]
        self.peers.forget(template)
        for worker in self.workers:
            worker.load.templates.pop(template.id, None)
            if worker.denoiser.is_ready:
                self.send(worker.denoiser, wire.Cancel(template.id))
            if head := self.naming.head_of(template.id, template.order, worker):
                self.forgetting.add(worker, head)
        for entry in template.entries.values():
            self.registrations.remove(entry)
            process = self.placement.process_of(entry)
            if process.abandon(entry) and process.role != "denoise":
                self.send(process, wire.Cancel(entry.id))
        for parked in list(template.parked):
            self.unpark(template, parked)


def update_load(worker: Worker, template: TemplateRecord) -> None:
    """Tell the router the fastest tier in which a worker finds a template."""
    if tier := template.tier_at(worker.index, worker.host):
        worker.load.templates[template.id] = tier
    else:
        worker.load.templates.pop(template.id, None)

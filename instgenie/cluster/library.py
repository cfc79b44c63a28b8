"""The templates a cluster knows: registered where, for whom, by which workers. Knows no edit but those that wait for a
template.

Every worker registers for itself what it has to use; what is on disk or further down all of them find. A template that
a client asked for is registered again when it is lost, others are let go.
"""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import Entry, Registering
from instgenie.cluster.messages import Send, prepare_template_message, register_message
from instgenie.cluster.orders import Order
from instgenie.cluster.places import Places
from instgenie.cluster.processes import Process, Worker
from instgenie.cluster.templates import SHARED, Template, template_id
from instgenie.errors import ClosedError
from instgenie.pictures.picture import working_size
from instgenie.scheduling.router import Work
from instgenie.types import Pixels

MAX_UNASKED = 4  # templates on their way to activations though nobody asked for them

working_size_of = lru_cache(working_size)


class Library:
    def __init__(self, config: ClusterConfig, places: Places, send: Send) -> None:
        self.config = config
        self.places = places
        self.send = send
        self.model_facts: wire.ModelFacts | None = None
        self.templates: dict[str, Template] = {}
        self._forgetting: dict[int, dict[str, wire.TemplateHead]] = {worker.index: {} for worker in places.workers}
        self._listed: set[str] = set()  # models whose templates are known
        self._listing: dict[str, int] = {}  # of each other, the worker that was asked for them
        self._recalls: dict[tuple[int, str], asyncio.Future[Pixels | None]] = {}  # by worker and template

    # names

    def registering(self, tenant: str, picture: Pixels, steps: int | None, guidance: float | None) -> Registering:
        """What is None, and what makes no difference to the model, is filled in."""
        facts = self.model_facts
        assert facts is not None
        height, width, _ = picture.shape
        steps = facts.steps if steps is None else steps
        guidance = facts.guidance if guidance is None or not facts.embeds_guidance else guidance
        return Registering(tenant, (height, width), steps, float(guidance), picture)

    def registering_of(self, order: Order) -> Registering:
        return self.registering(order.tenant, order.picture, order.wish.steps, order.wish.guidance)

    def holders(self, name: str | None) -> Sequence[int]:
        """Workers that have the template's activations in memory."""
        template = self.templates.get(name or "")
        return list(template.holders) if template else ()

    def head(self, entry: Entry) -> wire.TemplateHead | None:
        """Of the template whose activations an edit uses."""
        if entry.template is None:
            return None
        return self.head_of(entry.template, self.registering_of(entry.edit), self.places.workers[entry.worker])

    def head_of(self, template: str, registering: Registering, worker: Worker) -> wire.TemplateHead | None:
        """None as long as it is not known which model the worker has."""
        facts = self.model_facts
        if facts is None or worker.identity is None:
            return None
        size = working_size_of(*registering.size, facts.size_multiple, facts.own_size)
        return wire.TemplateHead(
            template, registering.tenant, worker.identity, size, registering.steps, registering.guidance
        )

    # what comes in

    def ask_for(self, registering: Registering) -> Template:
        """A client does."""
        name = template_id(registering)
        template = self._learn(name, registering)
        template.is_asked_for = True
        if template.state == "failed" or not (template.is_held or template.entries):
            self.register_on(template, self.places.choose([Work(registering.steps, 0, 0, name)]))
        return template

    def register_unasked(self, name: str, registering: Registering, worker: Worker) -> None:
        """The next edit of this picture will find its activations."""
        known = self.templates.get(name)
        is_tried = known is not None and known.registering.picture is not None
        num_unasked = sum(not template.is_asked_for and bool(template.entries) for template in self.templates.values())
        if not is_tried and num_unasked < MAX_UNASKED:
            self.register_on(self._learn(name, registering), worker)

    def _learn(self, name: str, registering: Registering) -> Template:
        """The template, with its picture."""
        template = self.templates.setdefault(name, Template(name, registering))
        template.registering = registering
        return template

    def forget(self, template: Template) -> None:
        """Every worker forgets it, in all its tiers; one that is not there does when it comes back."""
        del self.templates[template.id]
        for worker in self.places.workers:
            worker.load.templates.pop(template.id, None)
            if head := self.head_of(template.id, template.registering, worker):
                self._forgetting[worker.index][template.id] = head
            if worker.processes["denoise"].is_ready:
                self.send(worker.processes["denoise"], wire.Cancel(template.id))
                self.send_forgetting(worker)
        for entry in template.entries.values():
            self.places.process_of(entry).remove(entry)
        self._unpark(template)

    def send_forgetting(self, worker: Worker) -> None:
        for head in self._forgetting[worker.index].values():
            self.send(worker.processes["denoise"], wire.Forget(head))

    def may_be_below(self, template: str) -> bool:
        """Whether activations that the cluster does not know of may lie in a tier that outlives it."""
        is_known = template in self.templates or any(template in heads for heads in self._forgetting.values())
        return self.config.reuse and self.config.cache.is_lasting and not is_known

    def meet(self, name: str, entry: Entry) -> None:
        """A template that was registered before the cluster was there, found by an edit."""
        is_new = name not in self.templates
        template = self._learn(name, self.registering_of(entry.edit))
        if is_new:
            template.state, template.num_registered_steps = "ready", template.registering.steps
        self.places.workers[entry.worker].load.templates.setdefault(name, "host")  # where it was brought to

    # registration

    def register_on(self, template: Template, worker: Worker, is_urgent: bool = False) -> None:
        if worker.index in template.entries:
            self._hurry(template.entries[worker.index], is_urgent)
            return
        order = template.registering
        work = Work(order.steps, 0, 0)
        entry = Entry(template.id, order, work, [], worker.index, is_urgent=is_urgent)
        template.entries[worker.index] = entry
        if not template.is_held:
            template.state = "queued"
        self.places.process_of(entry).put(entry)

    def dispatch(self, process: Process, entry: Entry, order: Registering) -> None:
        if entry.stage == "prepare":
            self.send(process, *prepare_template_message(entry, order))
            return
        head = self.head_of(entry.id, order, self.places.workers[entry.worker])
        assert head is not None
        self.send(process, *register_message(entry, order, head, self.config.cache.is_lasting))

    def _hurry(self, entry: Entry, is_urgent: bool) -> None:
        is_news = is_urgent and not entry.is_urgent
        entry.is_urgent |= is_urgent
        process = self.places.process_of(entry)
        if is_news and entry.stage == "denoise" and entry.id in process.held:
            assert isinstance(entry.order, Registering)
            self.dispatch(process, entry, entry.order)

    def park(self, entry: Entry) -> None:
        """An edit that is to use activations its worker does not have waits until they are registered there."""
        assert entry.template is not None
        self.places.process_of(entry).remove(entry)
        registering = self.registering_of(entry.edit)
        template = self._learn(entry.template, registering)
        entry.move("park")
        template.parked.append(entry)
        self.register_on(template, self.places.workers[entry.worker], is_urgent=True)

    def drop(self, entry: Entry) -> None:
        """An edit that waits for nothing any more."""
        template = self.templates.get(entry.template or "")
        if template and entry in template.parked:
            template.parked.remove(entry)

    def _unpark(self, template: Template, worker: int | None = None) -> None:
        going = [entry for entry in template.parked if worker in (None, entry.worker)]
        for entry in going:
            template.parked.remove(entry)
            entry.move("denoise")
            self.places.put(entry)

    # what workers tell

    def on_registered(self, process: Process, message: wire.Registered, frames: list[wire.Frame]) -> None:
        template = self.templates.get(message.id)
        entry = process.held.get(message.id)
        if template is None or entry is None or entry.attempt != message.attempt:
            return
        template.num_registered_steps = message.num_registered_steps
        template.state = "registering"
        if message.num_registered_steps == message.num_steps:
            del process.held[message.id]
            template.entries.pop(process.worker, None)
            template.state = "ready"
            template.keep_in_memory(process.worker, message.tier_bytes)
            tier = template.tier_at(process.worker) or "disk"  # it is somewhere; what is kept is told next
            self.places.workers[process.worker].load.templates[template.id] = tier
            self._unpark(template, process.worker)

    def on_kept(self, process: Process, message: wire.Kept, frames: list[wire.Frame]) -> None:
        self.places.workers[process.worker].tier_bytes = message.tier_bytes
        template = self.templates.get(message.template or "")
        if template is None:
            return
        template.keep(process.worker, message.template_bytes)
        self._tell_router(template)
        if not (template.is_held or template.entries or template.parked):
            template.state, template.message = "failed", "its activations made room for others: register it again"
            if not template.is_asked_for:
                del self.templates[template.id]

    def on_forgotten(self, process: Process, message: wire.Forgotten, frames: list[wire.Frame]) -> None:
        self._forgetting[process.worker].pop(message.template, None)

    # what outlived a cluster

    def ask_what_there_is(self, worker: Worker) -> None:
        """Once for each model, of the first worker that has it."""
        model = worker.identity
        is_lasting = self.config.reuse and self.config.cache.is_lasting
        if is_lasting and model and model not in {*self._listed, *self._listing}:
            self._listing[model] = worker.index
            self.send(worker.processes["denoise"], wire.List(model))

    def on_listed(self, process: Process, message: wire.Listed, frames: list[wire.Frame]) -> None:
        self._listing.pop(message.model, None)
        self._listed.add(message.model)
        for listing in message.templates:
            name = listing.template.id
            if name not in self.templates and not any(name in heads for heads in self._forgetting.values()):
                self._list(name, listing)

    def _list(self, name: str, listing: wire.Listing) -> None:
        """One that is not whole is shown, so that it can be forgotten; an edit of its picture registers the rest."""
        head = listing.template
        registering = Registering(head.tenant, listing.picture, head.steps, head.guidance, None)
        template = self.templates[name] = Template(name, registering)
        template.num_registered_steps = listing.num_registered_steps
        if listing.num_registered_steps == head.steps:
            template.state, template.shared = "ready", listing.tier_bytes
            self._tell_router(template)
        else:
            template.state, template.message = "failed", "its registration was interrupted: register it again"

    def recall(self, template: Template) -> asyncio.Future[Pixels | None]:
        """Its picture, from where its activations are; None, if it is there no more."""
        for worker in self.places.workers:
            head = self.head_of(template.id, template.registering, worker)
            if head and worker.processes["denoise"].is_ready:
                place = worker.index, template.id
                if place not in self._recalls:
                    self._recalls[place] = asyncio.get_running_loop().create_future()
                    self.send(worker.processes["denoise"], wire.Recall(head))
                return self._recalls[place]
        raise ClosedError("no worker can look for the template's picture")

    def on_recalled(self, process: Process, message: wire.Recalled, frames: list[wire.Frame]) -> None:
        waiting = self._recalls.pop((process.worker, message.template), None)
        if waiting and not waiting.done():
            waiting.set_result(wire.read_picture(frames[0], message.size) if message.size else None)

    def lacks(self, worker: int, name: str) -> bool:
        """A worker does not find it, where others may; whether it is known at all."""
        template = self.templates.get(name)
        if template:
            template.keep(worker, {})
            self._tell_router(template)
        return template is not None

    def _tell_router(self, template: Template) -> None:
        for worker in self.places.workers:
            self._tell_load(template, worker)

    def _tell_load(self, template: Template, worker: Worker) -> None:
        if tier := template.tier_at(worker.index):
            worker.load.templates[template.id] = tier
        else:
            worker.load.templates.pop(template.id, None)

    # what is lost

    def lose_all(self, worker: Worker) -> None:
        """What is on disk is not lost with a process; what it was asked for is."""
        self._listing = {model: index for model, index in self._listing.items() if index != worker.index}
        for place in [place for place in self._recalls if place[0] == worker.index]:
            self._recalls.pop(place).set_exception(ClosedError("the worker that looked for the picture stopped"))
        worker.tier_bytes = {tier: num for tier, num in worker.tier_bytes.items() if tier in SHARED}
        for name in list(worker.load.templates):
            self._lose(name, worker)
            template = self.templates.get(name)
            if template is None or template.is_held:
                continue
            if template.is_asked_for:
                template.num_registered_steps = 0
                self.register_on(template, worker)
            elif not (template.entries or template.parked):
                del self.templates[name]

    def _lose(self, name: str, worker: Worker) -> None:
        template = self.templates.get(name)
        if template:
            template.holders.pop(worker.index, None)
            self._tell_load(template, worker)
        else:
            worker.load.templates.pop(name, None)

    def fail(self, entry: Entry, message: str) -> None:
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

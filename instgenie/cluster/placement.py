"""The worker an entry belongs to, and the process that its stage runs in. Knows no message."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from instgenie.cluster.config import Role
from instgenie.cluster.entries import ComputeMode, EditEntry, Entry
from instgenie.cluster.orders import Order
from instgenie.cluster.processes import Process, Worker
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.router import Router, Work, WorkerLoad


class Placement:
    def __init__(self, policy: RoutingPolicy, workers: Sequence[Worker]) -> None:
        self.router = Router(policy, seed=None)  # fronts that drew the same workers would crowd them
        self.workers = workers
        self.processes = [process for worker in workers for process in worker.processes.values()]
        self.changes = self.processes[0].changes
        self.on_placed: Callable[[str, int], None] = lambda key, worker: None  # of edits with a key
        self._ready: list[WorkerLoad] = []  # as of the last change of a state

    @property
    def ready_loads(self) -> list[WorkerLoad]:
        """The loads of the workers that are ready, as far as what is known of them is fresh."""
        if self.changes.states:
            self.changes.states = False
            self._ready = [worker.load for worker in self.workers if worker.takes_edits]
        return self._ready

    def take_changed(self) -> list[Process]:
        """The processes that may take entries, or may have lost some, since the last call."""
        changed = list(self.changes.processes)
        self.changes.processes.clear()
        return changed

    def choose(self, works: Sequence[Work], holders: Sequence[int] = ()) -> Worker:
        """Choose one worker for all of the works: a ready one, or else one that may become ready. `holders` are workers
        that have the template's activations in memory."""
        loads = self.ready_loads or self._hopeful_loads()
        drawn = (self.workers[index] for index in self.router.sample(holders))
        holding = [worker.load for worker in drawn if worker.takes_edits]
        return self.workers[self.router.choose(total_work(works), loads, holding)]

    def home_of(self, order: Order) -> Worker | None:
        """The worker that may have begun an order with the same key, if it can go on with it."""
        if order.home is None or order.home >= len(self.workers):
            return None
        worker = self.workers[order.home]
        return worker if worker.is_ready else None

    def _hopeful_loads(self) -> list[WorkerLoad]:
        """The loads of workers that may become ready; if there are none, of all."""
        hopeful = [worker.load for worker in self.workers if not worker.is_broken]
        return hopeful or [worker.load for worker in self.workers]

    def settle(self, entry: EditEntry, worker: Worker) -> None:
        """Assign an edit to a worker, and bring the worker's load up to date."""
        if entry.worker != worker.index:
            self.workers[entry.worker].load.arrived(entry.work.template)
        self.remove(entry)
        entry.worker = worker.index
        worker.edits[entry.id] = entry
        if entry.order.key:
            self.on_placed(entry.order.key, worker.index)
        if entry.stage == "finish":
            worker.load.hand_over(entry.id)
            return
        costs, num_tokens, num_masked = worker.load.costs, entry.num_tokens, entry.num_masked_tokens
        if entry.mode is ComputeMode.OWN:
            price = costs.own_price(num_tokens, num_masked, entry.work.own_share)
        else:
            is_cached = entry.mode is ComputeMode.CACHED
            tier = worker.load.templates.get(entry.template or "", "host") if is_cached else None
            price = costs.price(num_tokens, num_masked, tier)
        price = costs.guided(price, num_tokens, entry.work.guided)
        worker.load.add(entry.id, entry.num_steps - entry.step, entry.num_computed_tokens, price)

    def remove(self, entry: EditEntry) -> None:
        """Take an edit from its worker."""
        worker = self.workers[entry.worker]
        worker.load.remove(entry.id)
        worker.edits.pop(entry.id, None)
        worker.denoiser.touch()  # others are nearer to their turn

    def put(self, entry: Entry) -> None:
        """Queue an entry for its stage's process. An edit moves to another worker if its own is not ready and one is;
        a template stays with its worker."""
        is_stranded = not self.process_of(entry).is_ready and bool(self.ready_loads)
        if is_stranded and isinstance(entry, EditEntry):
            self.settle(entry, self.choose([replace(entry.work, must_reuse=entry.mode is ComputeMode.CACHED)]))
        self.process_of(entry).put(entry)

    def process_of(self, entry: Entry) -> Process:
        role: Role = entry.stage if entry.stage in ("prepare", "finish") else "denoise"
        processes = self.workers[entry.worker].processes
        return processes.get(role, processes["denoise"])


def total_work(works: Sequence[Work]) -> Work:
    """The edits of one request as one piece of work."""
    return Work(
        num_steps=max(work.num_steps for work in works),
        num_tokens=sum(work.num_tokens for work in works),
        num_masked_tokens=sum(work.num_masked_tokens for work in works),
        template=works[0].template,
        num_edits=len(works),
        must_reuse=works[0].must_reuse,
        own_share=works[0].own_share,
        loras=works[0].loras,
        num_free_steps=works[0].num_free_steps,
        controls=works[0].controls,
        guided=works[0].guided,
    )

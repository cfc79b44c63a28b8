"""Where entries are: which worker an entry belongs to, and which process of it has its stage. Knows no message."""

from collections.abc import Iterable, Sequence

from instgenie.cluster.config import Role
from instgenie.cluster.entries import Entry
from instgenie.cluster.orders import Order
from instgenie.cluster.processes import Process, Worker
from instgenie.scheduling.router import Policy, Router, Work


class Places:
    def __init__(self, policy: Policy, workers: Sequence[Worker]) -> None:
        self.router = Router(policy)
        self.workers = workers

    @property
    def processes(self) -> list[Process]:
        return [process for worker in self.workers for process in worker.processes.values()]

    def choose(self, works: Sequence[Work], holders: Iterable[int] = ()) -> Worker:
        """For all of them together. Of the workers that are ready; if none is, of those that may be. Holders have the
        template's activations in memory."""
        ready = [worker for worker in self.workers if worker.is_ready]
        hopeful = [worker for worker in self.workers if worker.state != "failed"]
        loads = [worker.load for worker in ready or hopeful or self.workers]
        total = Work(
            num_steps=max(work.num_steps for work in works),
            num_tokens=sum(work.num_tokens for work in works),
            num_masked_tokens=sum(work.num_masked_tokens for work in works),
            template=works[0].template,
            num_edits=len(works),
        )
        holding = [self.workers[index].load for index in holders if self.workers[index].is_ready]
        return self.workers[self.router.choose(total, loads, holding)]

    def settle(self, entry: Entry, worker: Worker) -> None:
        """The entry is the worker's, which has so much more to do."""
        self.workers[entry.worker].load.remove(entry.id)
        entry.worker = worker.index
        if isinstance(entry.order, Order) and entry.stage == "finish":
            worker.load.hand_over(entry.id)
        elif isinstance(entry.order, Order):
            tier = worker.load.templates.get(entry.template, "host") if entry.template and entry.is_sure else None
            price = worker.load.costs.price(entry.num_tokens, entry.num_masked_tokens, tier)
            worker.load.add(entry.id, entry.num_steps - entry.step, entry.num_computed_tokens, price)

    def put(self, entry: Entry) -> None:
        """Into the queue of its stage's process; an edit goes to another worker if its own is not ready and one is."""
        is_stranded = not self.process_of(entry).is_ready and any(worker.is_ready for worker in self.workers)
        if is_stranded and isinstance(entry.order, Order):
            self.settle(entry, self.choose([entry.work]))
        self.process_of(entry).put(entry)

    def process_of(self, entry: Entry) -> Process:
        role: Role = entry.stage if entry.stage in ("prepare", "finish") else "denoise"
        processes = self.workers[entry.worker].processes
        return processes.get(role, processes["denoise"])

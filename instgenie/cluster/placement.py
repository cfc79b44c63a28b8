"""The worker an entry belongs to, and the process that its stage runs in. Knows no message."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from instgenie.cluster.config import Role
from instgenie.cluster.entries import ComputeMode, EditEntry, Entry
from instgenie.cluster.processes import Process, Worker
from instgenie.scheduling.names import RoutingPolicy
from instgenie.scheduling.router import Router, Work


class Placement:
    def __init__(self, policy: RoutingPolicy, workers: Sequence[Worker]) -> None:
        self.router = Router(policy)
        self.workers = workers

    @property
    def processes(self) -> list[Process]:
        return [process for worker in self.workers for process in worker.processes.values()]

    def choose(self, works: Sequence[Work], holders: Iterable[int] = ()) -> Worker:
        """Choose one worker for all of the works: a ready one, or else one that may become ready. `holders` are workers
        that have the template's activations in memory."""
        ready = [worker for worker in self.workers if worker.is_ready]
        hopeful = [worker for worker in self.workers if not worker.is_broken]
        loads = [worker.load for worker in ready or hopeful or self.workers]
        holding = [self.workers[index].load for index in holders if self.workers[index].is_ready]
        return self.workers[self.router.choose(total_work(works), loads, holding)]

    def settle(self, entry: EditEntry, worker: Worker) -> None:
        """Assign an edit to a worker, and bring the worker's load up to date."""
        self.workers[entry.worker].load.remove(entry.id)
        entry.worker = worker.index
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
        worker.load.add(entry.id, entry.num_steps - entry.step, entry.num_computed_tokens, price)

    def put(self, entry: Entry) -> None:
        """Queue an entry for its stage's process. An edit moves to another worker if its own is not ready and one is;
        a template stays with its worker."""
        is_stranded = not self.process_of(entry).is_ready and any(worker.is_ready for worker in self.workers)
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
    )

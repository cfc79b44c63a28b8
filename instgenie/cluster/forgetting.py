"""Templates that are being deleted: a worker that is down deletes them when it is back."""

from collections.abc import Sequence

from instgenie.cluster import wire
from instgenie.cluster.messages import Send
from instgenie.cluster.processes import Process, Worker


class Forgetting:
    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        self.send = send
        self._heads: dict[int, dict[str, wire.TemplateHead]] = {worker.index: {} for worker in workers}

    def __contains__(self, template: str) -> bool:
        """True if a worker has not yet deleted it."""
        return any(template in heads for heads in self._heads.values())

    def add(self, worker: Worker, head: wire.TemplateHead) -> None:
        self._heads[worker.index][head.id] = head
        if worker.denoiser.is_ready:
            self.send_all(worker)

    def send_all(self, worker: Worker) -> None:
        """Tell a worker all that it has to delete."""
        for head in self._heads[worker.index].values():
            self.send(worker.denoiser, wire.Forget(head))

    def on_forgotten(self, process: Process, message: wire.Forgotten, frames: list[wire.Frame]) -> None:
        self._heads[process.worker].pop(message.template, None)

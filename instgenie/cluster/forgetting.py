"""Templates that are being deleted: a worker that is down deletes them when it is back, and a worker that could not ask
a tier is told again, after pauses that grow."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from instgenie.cluster import wire
from instgenie.cluster.messages import Send
from instgenie.cluster.processes import Process, Worker
from instgenie.types import TierName

FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds


class Forgetting:
    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        self.workers, self.send = workers, send
        self._heads: dict[int, dict[str, wire.TemplateHead]] = {worker.index: {} for worker in workers}
        self._left: dict[str, tuple[TierName, ...]] = {}  # tiers that could not be asked when it was last tried
        self._pauses: dict[str, float] = {}  # before the next try, by template
        self._changed = asyncio.Event()

    def __contains__(self, template: str) -> bool:
        """True if a worker has not yet deleted it."""
        return any(template in heads for heads in self._heads.values())

    def tenant_of(self, template: str) -> str | None:
        """The owner of a template that is being deleted."""
        return next((heads[template].tenant for heads in self._heads.values() if template in heads), None)

    def left(self, template: str) -> Sequence[TierName]:
        """The tiers that could not be asked and may still have a template."""
        return self._left.get(template, ())

    def add(self, worker: Worker, head: wire.TemplateHead) -> None:
        self._heads[worker.index][head.id] = head
        if worker.denoiser.is_ready:
            self.send(worker.denoiser, wire.Forget(head))

    def send_all(self, worker: Worker) -> None:
        """Tell a worker all that it has to delete."""
        for head in self._heads[worker.index].values():
            self.send(worker.denoiser, wire.Forget(head))

    def cancel(self, template: str) -> None:
        """Delete a template no more: it is registered again."""
        for heads in self._heads.values():
            heads.pop(template, None)
        self._end(template)

    def on_forgotten(self, process: Process, message: wire.Forgotten, frames: list[wire.Frame]) -> None:
        name = message.template
        if name not in self._heads[process.worker]:
            return
        if message.left:
            self._left[name] = message.left
            pause = self._pauses.get(name, FIRST_PAUSE)
            self._pauses[name] = min(2 * pause, LAST_PAUSE)
            asyncio.get_running_loop().call_later(pause, self._try_again, self.workers[process.worker], name)
        else:
            del self._heads[process.worker][name]
            if name not in self:
                self._end(name)
        self._changed.set()

    def is_done(self, template: str) -> bool:
        """True if every worker that can delete a template has done so, and there is one."""
        holding = [worker for worker in self.workers if template in self._heads[worker.index]]
        is_any_up = any(worker.denoiser.is_ready for worker in self.workers)
        return is_any_up and not any(worker.denoiser.is_ready for worker in holding)

    async def until_done(self, template: str, timeout: float) -> bool:
        """Wait until a template is deleted, or a tier could not be asked. Return whether it is deleted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (self.is_done(template) or self.left(template)):
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_done(template)

    def _try_again(self, worker: Worker, template: str) -> None:
        head = self._heads[worker.index].get(template)
        if head and worker.denoiser.is_ready:
            self.send(worker.denoiser, wire.Forget(head))

    def _end(self, template: str) -> None:
        self._left.pop(template, None)
        self._pauses.pop(template, None)

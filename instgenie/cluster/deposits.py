"""Requests and answers that this front leaves with a worker which other fronts share, so that any of them can go on
with a request, or give out its answer. A worker keeps them for a while, in its finish process."""

import asyncio
from collections.abc import Sequence

from instgenie.cluster import wire
from instgenie.cluster.messages import Send
from instgenie.cluster.processes import Process, Worker

SECONDS_TO_ANSWER = 5.0


class Deposits:
    def __init__(self, workers: Sequence[Worker], send: Send) -> None:
        self.workers, self.send = workers, send
        self._waiting: dict[tuple[int, str], asyncio.Future[list[wire.Frame] | None]] = {}  # by worker and name

    @property
    def is_shared(self) -> bool:
        """True if other fronts may use the workers, too."""
        return any(worker.num_fronts for worker in self.workers)

    def put(self, worker: int, name: str, frames: Sequence[wire.Frame]) -> bool:
        """Leave something with a worker. False if nobody else could ask for it there."""
        keeper = self._keeper(worker)
        if keeper is None or not self.workers[worker].num_fronts:
            return False
        self.send(keeper, wire.Deposit(name), frames)
        return True

    async def get(self, worker: int, name: str) -> list[wire.Frame] | None:
        """Ask a worker for what was left with it; None if it has none, or does not reply."""
        keeper = self._keeper(worker)
        if keeper is None:
            return None
        place = worker, name
        if place not in self._waiting:
            self._waiting[place] = asyncio.get_running_loop().create_future()
            self.send(keeper, wire.Collect(name))
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                return await asyncio.shield(self._waiting[place])
        except TimeoutError:
            self._waiting.pop(place, None)
            return None

    def on_collected(self, process: Process, message: wire.Collected, frames: list[wire.Frame]) -> None:
        waiting = self._waiting.pop((process.worker, message.name), None)
        if waiting and not waiting.done():
            waiting.set_result(frames if message.is_found else None)

    def _keeper(self, worker: int) -> Process | None:
        finisher = self.workers[worker].processes.get("finish")
        return finisher if finisher and finisher.is_ready else None

"""Workers that several fronts share. Each front tells a worker what it has given to it, and the worker tells each front
what the others have, so that every router sees the whole load. Knows loads and signs of life; knows no edit.

A cluster whose workers serve one front only sends and receives nothing of this.
"""

import asyncio
import time
from collections.abc import Sequence

from instgenie.cluster import wire
from instgenie.cluster.messages import Send
from instgenie.cluster.processes import Process, Worker
from instgenie.scheduling.backlog import NO_LOAD, LoadSums

SECONDS_BETWEEN_TELLS = 0.1  # of the load that this front has given to a worker, if it has changed
STALE_SECONDS = 5.0  # a worker that is silent for longer gets no new edit if another can run it


class Sharing:
    def __init__(self, workers: Sequence[Worker], timeout: float, send: Send) -> None:
        """A process forgets a front that is silent for the timeout."""
        self.workers, self.send = workers, send
        self.seconds_between_beats = min(5.0, timeout / 4)
        self._shared: dict[int, Worker] = {}
        self._told: dict[int, LoadSums] = {}  # by worker
        self._beat_at = 0.0
        self._telling: asyncio.Task[None] | None = None

    def on_foreign(self, process: Process, message: wire.Foreign, frames: list[wire.Frame]) -> None:
        worker = self.workers[process.worker]
        worker.load.share(message.load)
        worker.num_fronts = message.num_fronts
        self._shared[worker.index] = worker
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_often())

    def lose(self, process: Process) -> None:
        """Note that a process died. A new one has no work of other fronts."""
        if process.role == "denoise":
            worker = self.workers[process.worker]
            worker.load.share(NO_LOAD)
            worker.num_fronts, worker.is_stale = 0, False
            self._told.pop(worker.index, None)

    async def _tell_often(self) -> None:
        while self._shared:
            self.tell(time.monotonic())
            await asyncio.sleep(SECONDS_BETWEEN_TELLS)

    def tell(self, now: float) -> None:
        """Tell each worker what this front has given to it, if that has changed; to all processes, from time to time,
        that this front lives."""
        is_due = now - self._beat_at >= self.seconds_between_beats
        self._beat_at = now if is_due else self._beat_at
        for worker in list(self._shared.values()):
            if worker.num_fronts:
                self._tell_load(worker, is_due)
                self._judge(worker, now)
            if is_due:
                for process in worker.processes.values():
                    if process is not worker.denoiser and process.is_ready:
                        self.send(process, wire.Beat())

    def _tell_load(self, worker: Worker, is_due: bool) -> None:
        load = worker.load.own if worker.edits else NO_LOAD
        if is_due or load != self._told.get(worker.index, NO_LOAD):
            self._told[worker.index] = load
            self.send(worker.denoiser, wire.Assigned(load))

    def _judge(self, worker: Worker, now: float) -> None:
        """Note whether what is known of a worker is too old."""
        is_stale = now - worker.denoiser.heard_at > STALE_SECONDS
        if is_stale != worker.is_stale:
            worker.is_stale = is_stale
            worker.denoiser.changes.states = True

    def close(self) -> None:
        if self._telling:
            self._telling.cancel()

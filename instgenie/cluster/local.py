"""A cluster on one machine: spawned processes, ZeroMQ over ipc. Lives in the HTTP process and imports no torch.

Knows sockets, processes and their signs of life; `flow` knows what goes where.
"""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig, resolve_host_bytes
from instgenie.cluster.entries import Ticket
from instgenie.cluster.flow import Flow
from instgenie.cluster.orders import Order, TemplateStatus
from instgenie.cluster.processes import Process, Worker, make_workers
from instgenie.cluster.status import ClusterStatus, Observer, WorkerStatus
from instgenie.errors import ClosedError
from instgenie.pictures.picture import check_edit
from instgenie.types import Pixels

SECONDS_TO_END = 5.0
SECONDS_BETWEEN_LOOKS = 0.5

log = logging.getLogger(__name__)


class Cluster:
    def __init__(self, config: ClusterConfig) -> None:
        self.config = resolve_host_bytes(config)
        self.workers = make_workers(self.config)
        self.flow = Flow(self.config, self.workers, self._send)
        self._names: dict[bytes, Process] = {}  # the current start of each process
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False
        self._is_ending = False

    # life

    async def start(self) -> None:
        """Returns when the sockets are up; workers load in the background."""
        self._folder = Path(tempfile.mkdtemp(prefix="instgenie-"))  # nobody else may enter
        self._endpoint = f"ipc://{self._folder}/cluster"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # what is sent is bounded by what is accepted
        self._socket.bind(self._endpoint)
        self._is_open = True
        self._supervisors = [asyncio.create_task(self._supervise(process)) for process in self._processes]
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._watch())]

    async def stop(self, timeout: float) -> bool:
        """Takes no more orders, finishes the accepted ones within the timeout, ends all processes. Says whether every
        order was worked on to its end. What is left of the timeout, and a few seconds in any case, is the processes'
        own: they write what is worth keeping."""
        self._is_open = False
        end = time.monotonic() + timeout
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._until(lambda: not self.flow.entries)
        is_drained = not self.flow.entries
        self._is_ending = True
        self.flow.give_up("the server stopped before the edit was done")
        await self._end_processes(max(end - time.monotonic(), SECONDS_TO_END))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        return is_drained

    async def _end_processes(self, timeout: float) -> None:
        for process in self._processes:
            if process.is_ready:
                self._send(process, wire.Stop())
            else:
                process.kill()
        _, late = await asyncio.wait(self._supervisors, timeout=timeout)
        for process in self._processes:
            process.kill()
        if late:
            await asyncio.wait(late)

    @property
    def ready(self) -> bool:
        """Whether an order would be worked on at once."""
        return self._is_open and any(worker.is_ready for worker in self.workers)

    @property
    def healthy(self) -> bool:
        is_running = not self._is_ending and not any(task.done() for task in self._tasks)
        return is_running and any(worker.state != "failed" for worker in self.workers)

    @property
    def failure(self) -> str:
        """Why a worker cannot start; empty if all can."""
        return next((process.message for process in self._processes if process.state == "failed"), "")

    @property
    def model_facts(self) -> wire.ModelFacts | None:
        """Known once a worker is ready."""
        return self.flow.library.model_facts

    async def until_ready(self) -> None:
        """Waits for the first worker; raises if none can start."""
        await self._until(lambda: self.ready or not self.healthy or not self._is_open)
        self._check_open()

    # orders and templates

    def submit(self, orders: Sequence[Order]) -> list[Ticket]:
        """Orders of one request share a worker and a batch. Raises for what is out of range in any of them."""
        self._check_open()
        for order in orders:
            check_edit(order.wish.edit(order.picture, order.mask, 1, 1.0))  # what the model chooses cannot be wrong
        return self.flow.accept(orders)

    async def register(
        self, tenant: str, picture: Pixels, steps: int | None = None, guidance: float | None = None
    ) -> TemplateStatus:
        """Queued, and registered when a worker has a moment. Waits until the model is known."""
        await self.until_ready()
        template = self.flow.register(self.flow.library.registering(tenant, picture, steps, guidance))
        return template.status()

    def templates(self, tenant: str) -> list[TemplateStatus]:
        found = (template for template in self.flow.library.templates.values() if template.registering.tenant == tenant)
        return [template.status() for template in found]

    def template(self, tenant: str, id: str) -> TemplateStatus | None:
        return next((status for status in self.templates(tenant) if status.id == id), None)

    async def picture(self, tenant: str, id: str) -> Pixels | None:
        """Of a template. Raises if it cannot be had at present."""
        template = self.flow.library.templates.get(id)
        if template is None or template.registering.tenant != tenant:
            return None
        if template.registering.picture is not None:
            return template.registering.picture
        return await asyncio.shield(self.flow.library.recall(template))

    async def forget(self, tenant: str, id: str) -> bool:
        """Whether there was one."""
        if self.template(tenant, id) is None:
            return False
        self.flow.forget(self.flow.library.templates[id])
        return True

    def observe(self, observer: Observer) -> None:
        self.flow.observers.append(observer)

    def status(self) -> ClusterStatus:
        flow = self.flow
        return ClusterStatus(
            workers=tuple(self._worker_status(worker) for worker in self.workers),
            num_waiting=flow.num_waiting,
            num_running=flow.num_running,
            num_finished=flow.counts["finished"],
            num_failed=flow.counts["failed"],
            num_cancelled=flow.counts["cancelled"],
            num_restarts=sum(max(process.num_starts - 1, 0) for process in self._processes),
            num_cache_queries=flow.counts["queries"],
            cache_hits=dict(flow.cache_hits),
        )

    def _worker_status(self, worker: Worker) -> WorkerStatus:
        entries = [entry for entry in self.flow.entries.values() if entry.worker == worker.index]
        return WorkerStatus(
            index=worker.index,
            device=worker.device,
            state=worker.state,
            processes=tuple(process.status for process in worker.processes.values()),
            running=tuple(entry.status for entry in entries if entry.is_running),
            num_waiting=sum(entry.is_waiting for entry in entries),
            steps_per_second=worker.steps_per_second,
            last_step_seconds=worker.last_step_seconds,
            num_steps=worker.num_steps,
            num_interruptions=worker.num_interruptions,
            predicted_seconds=worker.load.seconds,
            seconds_per_step=worker.load.pace.seconds(1, worker.load.costs.per_step),
            seconds_per_token=worker.load.seconds_per_token,
            templates=tuple(worker.load.templates),
            tier_bytes=dict(worker.tier_bytes),
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the server is stopping: it takes no more edits")
        if not self.healthy:
            raise ClosedError(f"no worker can start: {self.failure}")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # processes

    @property
    def _processes(self) -> list[Process]:
        return [process for worker in self.workers for process in worker.processes.values()]

    async def _supervise(self, process: Process) -> None:
        """Starts it, waits for its end, starts it again."""
        while not self._is_ending and process.state != "failed":
            self._names.pop(process.name.encode(), None)
            await process.start(self._endpoint)
            self._names[process.name.encode()] = process
            code = await process.ended()
            if not self._is_ending:
                self._lost(process, code)
                await asyncio.sleep(process.back_off())

    def _lost(self, process: Process, code: int) -> None:
        if process.state != "failed":
            process.state, process.message = "down", process.message or f"ended with {code}"
        log.error("process ended", extra={"worker_process": process.name, "code": code, "reason": process.message})
        self.flow.died(process)
        self._changed.set()

    async def _hear(self) -> None:
        while True:
            name, head, *frames = await self._socket.recv_multipart(copy=False)
            process = self._names.get(name.bytes)
            if process is None:  # an earlier start of a process
                continue
            process.heard_at = time.monotonic()
            try:
                self._handle(process, wire.decode(head.buffer), [frame.buffer for frame in frames])
            except Exception:
                log.exception("message not handled", extra={"worker_process": process.name})
            self._changed.set()

    def _handle(self, process: Process, message: wire.AnyMessage, frames: list[wire.Frame]) -> None:
        match message:
            case wire.Beat():
                pass
            case wire.Ready(facts, digest):
                process.state = "ready"
                log.info("process ready", extra={"worker_process": process.name})
                self.flow.ready(process, facts, digest)
            case wire.Broken(reason):
                process.state, process.message = "failed", reason
            case _:
                self.flow.handle(process, message, frames)

    async def _watch(self) -> None:
        """Kills what has shown no sign of life for too long. Time in which this loop itself stood still counts for
        nobody."""
        look_at = time.monotonic()
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            now = time.monotonic()
            late = max(now - look_at - 2 * SECONDS_BETWEEN_LOOKS, 0.0)
            look_at = now
            for process in self._processes:
                process.heard_at += late
                limit = self.config.worker_timeout if process.is_ready else self.config.start_timeout
                if process.is_alive and now - process.heard_at > limit:
                    process.message = f"no sign of life for {limit:g} s"
                    log.error("process hangs", extra={"worker_process": process.name, "seconds": limit})
                    process.kill()

    def _send(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        self._socket.send_multipart([process.name.encode(), wire.encode(message), *frames], copy=False)

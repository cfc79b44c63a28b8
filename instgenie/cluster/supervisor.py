"""Keeps the processes of a cluster running and carries their messages. Knows sockets and signs of life; the launcher
knows where processes run, and the coordinator what messages mean."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
import zmq.asyncio

from instgenie.cluster import wire
from instgenie.cluster.config import ResolvedConfig, Role, process_config
from instgenie.cluster.control_holdings import begin_controls, hold_controls
from instgenie.cluster.coordinator import Coordinator
from instgenie.cluster.launch import NODE_LOST, Launcher
from instgenie.cluster.processes import Process, Worker, make_services
from instgenie.machine.curve import Doorkeeper, secure_server
from instgenie.machine.pauses import Pauses

SECONDS_TO_DIE = 1.0  # for killed processes to be gone; a launcher that hangs is not waited for any longer
SECONDS_BETWEEN_LOOKS = 0.5

log = logging.getLogger(__name__)


class Supervisor:
    def __init__(self, config: ResolvedConfig, launcher: Launcher, workers: Sequence[Worker]) -> None:
        self.config = config
        self.launcher = launcher
        self.workers = workers
        self.services = make_services(config)  # processes that hold no entries
        own = [process for worker in workers for process in worker.processes.values()]
        self.processes = [*own, *self.services]
        self.coordinator = Coordinator(config, workers, self._send)
        self._by_name: dict[bytes, Process] = {}  # the current start of each process
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._supervisions: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_crashed = False  # True if the supervision of a process has ended by an error

    def start(self) -> None:
        """Bind the socket, and start all processes in the background."""
        address = self.launcher.open()
        self._context = zmq.asyncio.Context()
        secret = self.launcher.secret
        self._doorkeeper = Doorkeeper(self._context, secret)
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # no limit: the edits that are accepted bound what is sent
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a process may connect again before the loss is noticed here
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # else connections to nodes that are gone stay for ever
        secure_server(self._socket, secret)
        self._socket.bind(address)
        self._endpoint = self.launcher.endpoint(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._supervisions = [asyncio.create_task(self._supervise(process)) for process in self.processes]
        for task in self._supervisions:
            task.add_done_callback(self._note_crash)
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._watch())]

    async def stop(self, timeout: float) -> None:
        """End all processes, and kill those that take longer than the timeout."""
        self._ending.set()
        self._changed.set()
        if not self.launcher.release():
            for process in self.processes:
                if process.is_ready:
                    self._send(process, wire.Stop())
                else:
                    process.kill()
        _, late = await asyncio.wait(self._supervisions, timeout=timeout)
        for process in self.processes:
            process.kill()
        if late:
            await asyncio.wait(late, timeout=SECONDS_TO_DIE)
        self.coordinator.sharing.close()
        for task in (*self._tasks, *self._supervisions):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._supervisions, return_exceptions=True)
        self._socket.close(linger=0)
        self._doorkeeper.close()
        self._context.term()
        self.launcher.close()

    @property
    def is_running(self) -> bool:
        """False once it ends, or if a task that must go on has stopped. Every request asks this."""
        return not (self._ending.is_set() or self._has_crashed or any(task.done() for task in self._tasks))

    def _note_crash(self, task: asyncio.Task[None]) -> None:
        self._has_crashed |= not task.cancelled() and task.exception() is not None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is looked at after every message and every death."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # one process

    async def _supervise(self, process: Process) -> None:
        """Start a process, wait for its end, start it again."""
        while not self._ending.is_set():
            code = await self._run(process)
            if not self._ending.is_set():
                self._lost(process, code)
                await self._pause(process.back_off())  # in which its last message arrives
                if process.state == "failed":
                    await self.until(lambda: self._can_load(process.role) or self._ending.is_set())

    async def _pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the cluster."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _can_load(self, role: Role) -> bool:
        """True if a process of the role has loaded the model. What keeps others from it, like memory or a disk that are
        full, may then pass."""
        return any(process.has_been_ready for process in self.processes if process.role == role)

    async def _run(self, process: Process) -> int | None:
        """Run a process from its start to its end. Return its exit code; None if it could not be started."""
        self._by_name.pop(process.name.encode(), None)
        process.begin()
        self._by_name[process.name.encode()] = process
        num_sharing = max(sum(one.role == "denoise" for one in self._sharing(process)), 1)
        service, worker = (process.worker, None) if process.role == "controlnet" else (None, process.worker)
        where = process.device, self._endpoint
        config = process_config(self.config, process.name, *where, num_sharing, service, worker)
        try:
            process.launched = await self.launcher.start(process.worker, process.role, config)
        except OSError as error:
            process.message = f"could not be started: {error}"
            return None
        process.heard_at = time.monotonic()  # it may have waited long for a node
        if self._ending.is_set():
            process.kill()
        return await process.launched.wait()

    def _lost(self, process: Process, code: int | None) -> None:
        worker = None if process in self.services else self.workers[process.worker]
        if worker and code == NODE_LOST:
            worker.has_lost_node, worker.host_bytes = True, None  # another node has another memory
        process.end("its node is lost" if code == NODE_LOST else f"ended with exit code {code}")
        facts = {"worker_process": process.name, "code": code, "reason": process.message}
        log.log(logging.INFO if worker and worker.is_draining else logging.ERROR, "process ended", extra=facts)
        if worker:
            self.coordinator.died(process)
        self._begin_all()
        self._changed.set()

    # memory

    def _begin_all(self) -> None:
        """Have denoise processes take the memory that is left on their device, once all that share it have loaded."""
        for worker in self.workers:
            process = worker.denoiser
            if process.is_loaded and not process.has_begun and all(one.is_settled for one in self._sharing(process)):
                process.has_begun = True
                self._send(process, wire.Begin(self._host_bytes(worker)))

    def _sharing(self, process: Process) -> list[Process]:
        """The processes on its device, itself among them."""
        if self.launcher.shares_devices or process in self.services:
            return [one for one in self.processes if one.device == process.device]
        return list(self.workers[process.worker].processes.values())

    def _host_bytes(self, worker: Worker) -> int:
        """Main memory for a worker's activations: half of what its own node has left for it. It is measured once: at a
        restart, activations of the other workers are no reason to take less."""
        if worker.host_bytes is None:
            cache = self.config.cache
            left = self.launcher.worker_bytes(len(self.workers), worker.index) / 2
            is_known = cache.is_host_guessed and math.isfinite(left)
            is_less = cache.is_host_open and left < cache.host_bytes
            worker.host_bytes = int(left) if is_known or is_less else cache.host_bytes
        return worker.host_bytes

    # messages

    def _send(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        self._socket.send_multipart([process.name.encode(), wire.encode(message), *frames], copy=False)

    async def _hear(self) -> None:
        while True:
            name, head, *frames = await self._socket.recv_multipart(copy=False)
            process = self._by_name.get(name.bytes)
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
            case wire.Loading(done_bytes, total_bytes):
                process.loading = done_bytes, total_bytes
            case wire.Loaded():
                process.is_loaded = True
                self._begin_all()
            case wire.Ready(facts, digest, peer_address, layers, controls):
                process.succeed()
                begin_controls(process, self.services, self.workers)
                self.coordinator.naming.control_shape = controls or self.coordinator.naming.control_shape
                self.coordinator.naming.layer_table = layers or self.coordinator.naming.layer_table
                process.peer_address = peer_address
                self._begin_all()
                log.info("process ready", extra={"worker_process": process.name})
                self.coordinator.ready(process, facts, digest)
            case wire.Serving():
                process.succeed()
                begin_controls(process, self.services, self.workers)
                self._begin_all()
                log.info("process ready", extra={"worker_process": process.name})
            case wire.ControlNetsKept():
                hold_controls(process, message, self.services, self.workers)
            case wire.Broken(reason):
                process.message = f"{process.device}: {reason}" if process.device.startswith("cuda") else reason
                if not self._can_load(process.role):
                    process.state = "failed"
            case _:
                self.coordinator.handle(process, message, frames)

    async def _watch(self) -> None:
        """Kill processes that have been silent for too long. Time in which this loop itself was held up is not counted
        against them."""
        pauses = Pauses(2 * SECONDS_BETWEEN_LOOKS, time.monotonic())
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            now = time.monotonic()
            late = pauses.look(now)
            for process in self.processes:
                process.heard_at += late
                limit = self.config.worker_timeout if process.is_ready else self.config.start_timeout
                if process.is_alive and now - process.heard_at > limit:
                    process.message = f"no sign of life for {limit:g} s"
                    log.error("process hangs", extra={"worker_process": process.name, "seconds": limit})
                    process.kill()

"""The actor of one slot. It starts the slot's processes as its children, on the node where Ray has placed it, passes on
the orders of fronts and of the controller, and tells how its children end. It restarts nothing by itself. If it dies,
its children die; if its node dies, Ray starts it again on another one, without children.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace

import msgspec
import ray

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.control import Attach, ControlOrder, Detach, End, encode_order
from instgenie.cluster.environment import process_environment, seen_device
from instgenie.cluster.launch import LaunchedProcess, start_process
from instgenie.cluster.ray.names import NodeFacts
from instgenie.machine.cores import available_cores
from instgenie.machine.curve import SECRET
from instgenie.machine.memory import available_memory
from instgenie.machine.version import package_version
from instgenie.telemetry.traces import NODE

THREADS = "OMP_NUM_THREADS"


def node_facts() -> NodeFacts:
    node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    return NodeFacts(node, address, available_memory(), available_cores())


async def open_writer(pipe: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(pipe, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop)


class SlotProcess:
    """A child."""

    def __init__(self, child: LaunchedProcess, orders: asyncio.StreamWriter) -> None:
        self.child = child
        self.fronts: set[str] = set()
        self._orders = orders

    async def tell(self, order: ControlOrder) -> None:
        with suppress(OSError):  # it is about to end
            self._orders.write(encode_order(order))
            await self._orders.drain()


class NodeActor:
    def __init__(self, secret: str, num_threads: int | None, environment: dict[str, str]) -> None:
        """Children have `num_threads` threads, None: their share of the node's cores, and these variables."""
        self._variables = {SECRET: secret, **environment}
        self._num_threads = num_threads
        self._processes: dict[Role, SlotProcess] = {}
        self._starting = asyncio.Lock()
        self._is_ending = False

    async def facts(self) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(node_facts(), is_ending=self._is_ending))

    async def start(self, role: Role, encoded: bytes, version: str) -> int:
        """Have the role's process serve a front of this version: start it, or attach the front to it. Returns its
        pid."""
        if self._is_ending:
            raise OSError("the slot is about to be given up")
        if version != package_version():
            here, there = (f"InstGenIE {known or 'of no version'}" for known in (package_version(), version))
            raise OSError(f"the node has {here}, the front {there}: install the same version on both")
        config = msgspec.json.decode(encoded, type=ProcessConfig)
        async with self._starting:
            process = self._processes.get(role)
            if process is not None and process.child.is_alive:
                await process.tell(Attach(config.front, config.endpoint, config.name))
            else:
                process = self._processes[role] = await self._spawn(role, config)
        process.fronts.add(config.front)
        return process.child.pid

    async def _spawn(self, role: Role, config: ProcessConfig) -> SlotProcess:
        device = seen_device(config.device, os.environ).name
        peers = f"tcp://{ray.util.get_node_ip_address()}:*" if role == "denoise" else ""
        own = replace(config, parent=os.getpid(), device=device, peer_address=peers)
        variables = process_environment(config) | self._variables | {NODE: node_facts().name}
        if THREADS not in self._variables and self._num_threads:
            variables[THREADS] = str(self._num_threads)  # Ray has set another number for this actor
        reading, writing = os.pipe()
        orders = await open_writer(writing)
        try:
            with os.fdopen(reading) as stdin:
                return SlotProcess(await start_process(role, own, variables, stdin.fileno()), orders)
        except BaseException:
            orders.close()
            raise

    async def wait(self, role: Role, pid: int) -> int | None:
        """Wait for the end of a process, and return its exit code; None if this actor has never started it."""
        process = self._processes.get(role)
        return await process.child.wait() if process is not None and process.child.pid == pid else None

    async def kill(self, role: Role, pid: int) -> None:
        process = self._processes.get(role)
        if process is not None and process.child.pid == pid and process.child.is_alive:
            process.child.kill()

    async def detach(self, front: str) -> None:
        """Have all processes drop a front and its jobs."""
        for process in self._processes.values():
            if process.child.is_alive and front in process.fronts:
                process.fronts.discard(front)
                await process.tell(Detach(front))

    async def end(self, timeout: float) -> None:
        """Let all processes write what is worth keeping and exit; kill those that take longer than the timeout."""
        self._is_ending = True
        alive = [process for process in self._processes.values() if process.child.is_alive]
        for process in alive:
            await process.tell(End())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(process.child.wait() for process in alive))
        for process in alive:
            if process.child.is_alive:
                process.child.kill()
                await process.child.wait()

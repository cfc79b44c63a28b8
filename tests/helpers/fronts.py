"""Fronts that share the processes of their workers, on this machine and over TCP, without a cluster manager."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.control import Attach, ControlOrder, Detach, encode_order
from instgenie.cluster.environment import process_environment
from instgenie.cluster.launch import LaunchedProcess, start_process

GIB = 2**30


class SharedProcess:
    """A process as one front sees it."""

    def __init__(self, child: LaunchedProcess) -> None:
        self.child = child
        self.is_released = False

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return not self.is_released and self.child.is_alive

    async def wait(self) -> int:
        while self.is_alive:
            await asyncio.sleep(0.01)
        return 0 if self.child.is_alive else await self.child.wait()

    def kill(self) -> None:
        if not self.is_released:
            self.child.kill()


class Nodes:
    """The processes of all workers. Each is started once, by the front that asks first, and serves all fronts."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, Role], LaunchedProcess] = {}
        self._orders: dict[tuple[int, Role], int] = {}  # the pipes to their standard inputs
        self._starting = asyncio.Lock()

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> SharedProcess:
        async with self._starting:
            child = self.children.get((worker, role))
            if child is not None and child.is_alive:
                self.order(worker, role, Attach(config.front, config.endpoint, config.name))
                return SharedProcess(child)
            told = replace(config, has_control=True, parent=os.getpid())
            reading, self._orders[worker, role] = os.pipe()
            with os.fdopen(reading) as stdin:
                child = await start_process(role, told, process_environment(config), stdin.fileno())
            self.children[worker, role] = child
            return SharedProcess(child)

    def order(self, worker: int, role: Role, order: ControlOrder) -> None:
        os.write(self._orders[worker, role], encode_order(order))

    def detach(self, front: str) -> None:
        """Say that a front is gone."""
        for (worker, role), child in self.children.items():
            if child.is_alive:
                self.order(worker, role, Detach(front))

    async def close(self) -> None:
        for child in self.children.values():
            child.kill()
            await child.wait()
        for pipe in self._orders.values():
            os.close(pipe)


class SharedLauncher:
    """The launcher of one front."""

    secret = ""
    shares_devices = True

    def __init__(self, nodes: Nodes, front: str) -> None:
        self.nodes, self.front = nodes, front
        self.processes: list[SharedProcess] = []

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        return 2.0 * GIB

    def open(self) -> str:
        self.folder = Path(tempfile.mkdtemp())
        return f"ipc://{self.folder}/front"

    def endpoint(self, bound: str) -> str:
        return bound

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> SharedProcess:
        process = await self.nodes.start(worker, role, replace(config, front=self.front))
        self.processes.append(process)
        return process

    def release(self) -> bool:
        self.nodes.detach(self.front)
        for process in self.processes:
            process.is_released = True
        return True

    def close(self) -> None: ...

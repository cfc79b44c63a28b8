"""Fronts that share the processes of their workers, on this machine and over TCP, without a cluster manager."""

import asyncio
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.control import Attach, ControlOrder, Detach, encode_order
from instgenie.cluster.environment import process_environment
from instgenie.cluster.launch import process_command

GIB = 2**30


class SharedProcess:
    """A process as one front sees it."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self.child = child
        self.is_released = False

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_alive(self) -> bool:
        return not self.is_released and self.child.poll() is None

    async def wait(self) -> int:
        while self.is_alive:
            await asyncio.sleep(0.01)
        return self.child.returncode or 0

    def kill(self) -> None:
        if not self.is_released:
            self.child.kill()


class Nodes:
    """The processes of all workers. Each is started once, by the front that asks first, and serves all fronts."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, Role], subprocess.Popen[bytes]] = {}

    def start(self, worker: int, role: Role, config: ProcessConfig) -> SharedProcess:
        child = self.children.get((worker, role))
        if child is not None and child.poll() is None:
            self.order(child, Attach(config.front, config.endpoint, config.name))
            return SharedProcess(child)
        command = process_command(role, replace(config, has_control=True, parent=os.getpid()))
        child = subprocess.Popen(command, stdin=subprocess.PIPE, env=process_environment(config))
        self.children[worker, role] = child
        return SharedProcess(child)

    def order(self, child: "subprocess.Popen[bytes]", order: ControlOrder) -> None:
        assert child.stdin
        child.stdin.write(encode_order(order))
        child.stdin.flush()

    def detach(self, front: str) -> None:
        """Say that a front is gone."""
        for child in self.children.values():
            if child.poll() is None:
                self.order(child, Detach(front))

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
            if child.stdin:
                child.stdin.close()


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
        process = self.nodes.start(worker, role, replace(config, front=self.front))
        self.processes.append(process)
        return process

    def release(self) -> bool:
        self.nodes.detach(self.front)
        for process in self.processes:
            process.is_released = True
        return True

    def close(self) -> None: ...

"""Launching: the one place that knows how the processes of a cluster are started and where they run.

A cluster asks its launcher for an address to bind, for processes, and for the memory a worker may use. It assumes no
parent, no shared folder and no common memory limit. `LocalLauncher` starts child processes on this machine; a launcher
for other machines implements the same protocol.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.environment import process_environment, seen_device
from instgenie.cluster.nursery import can_fork, nurseries
from instgenie.machine.memory import available_memory

FOLDER_PREFIX = "instgenie-"
NODE_LOST = -1000  # exit code of a process that ended because its node did, or cannot be reached any more
LOCK = "owner.lock"  # held by the process that made the folder, as long as it lives


class LaunchedProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its id on its own node."""
        ...

    @property
    def is_alive(self) -> bool: ...

    async def wait(self) -> int:
        """Wait for its end, and return its exit code, or `NODE_LOST`."""
        ...

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""
        ...


class Launcher(Protocol):
    """Starts processes. If they check no parent, the launcher has to end them when the cluster itself dies."""

    @property
    def secret(self) -> str:
        """The secret that protects the sockets of the cluster; empty: only the cluster's own processes can reach
        them."""
        ...

    @property
    def shares_devices(self) -> bool:
        """True if workers on devices of one name share one device; False if each has a device of its own."""
        ...

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        """Main memory that each of the workers, or a given one, may use on its node now; infinity: unknown."""
        ...

    def open(self) -> str:
        """Prepare for starts, and return the ZeroMQ address that the cluster binds; its port may be a wildcard."""
        ...

    def endpoint(self, bound: str) -> str:
        """Return the address that processes connect to, given the bound one, in which wildcards are resolved."""
        ...

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> LaunchedProcess:
        """Start one process. Raises an OSError if that is not possible now; the cluster tries again later."""
        ...

    def release(self) -> bool:
        """Give up all processes, if others use them too or somebody else ends them: their `wait` returns. False if they
        are the cluster's own, which tells them to stop."""
        ...

    def close(self) -> None:
        """Release what `open` made. All processes have ended."""
        ...


class SpawnedProcess:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.returncode is None

    async def wait(self) -> int:
        return await self._child.wait()

    def kill(self) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGKILL)


class LocalLauncher:
    """Child processes of this process. They share its memory, talk over a socket in a folder that only this user can
    enter, and end with it. The folder of a process that was killed is deleted by the next one."""

    secret = ""
    shares_devices = True

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        return available_memory() / num_workers

    def open(self) -> str:
        delete_abandoned(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock = lock(self._folder / LOCK, os.O_CREAT)
        return f"ipc://{self._folder}/cluster"

    def endpoint(self, bound: str) -> str:
        return bound

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> LaunchedProcess:
        device = seen_device(config.device, os.environ).name
        peers = f"{config.endpoint}-{config.name}" if role == "denoise" and config.num_workers > 1 else ""
        told = replace(config, parent=os.getpid(), device=device, peer_address=peers)
        with open(os.devnull) as nothing:
            return await start_process(role, told, process_environment(config), nothing.fileno())

    def release(self) -> bool:
        return False

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def delete_abandoned(parent: Path) -> None:
    """Delete folders of sockets whose owners were killed. Those of other users and of living processes stay; a lock
    tells, since the id of a process may be in use again, or be another one in another container."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            held = lock(folder / LOCK)  # fails if there is none, or if its owner lives
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def lock(path: Path, flags: int = 0) -> int:
    """Open a file and lock it until it is closed, at the latest when this process ends."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


async def start_process(
    role: Role, config: ProcessConfig, environment: Mapping[str, str], stdin: int
) -> LaunchedProcess:
    """Start a process that ends with this one: it is forked where that is possible, else it imports everything
    itself."""
    if can_fork(config.device) and (nursery := nurseries.choose(environment)).is_fit:
        forked = await nursery.fork(role, config, environment, stdin)
        if forked:
            return forked
    command = process_command(role, config)
    return SpawnedProcess(await asyncio.create_subprocess_exec(*command, stdin=stdin, env=environment))


def process_command(role: Role, config: ProcessConfig) -> list[str]:
    """The command line of a process, on a machine where this Python and this package are installed."""
    module = f"instgenie.workers.{role}"
    return [sys.executable, "-m", "instgenie.workers", module, msgspec.json.encode(config).decode()]

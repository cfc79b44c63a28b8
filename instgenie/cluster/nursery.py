"""Forked processes. Importing torch and the models takes a process seconds; a nursery has imported all of it and forks
one process after the other (`workers/nursery.py`), so that starts and restarts take no time for it.

A launching process has one nursery for all its clusters, since they have one environment; a start with another one
makes another nursery. A request goes to the nursery over a socket, with the files of the new process and the end of a
pipe. Through the pipe the nursery tells the pid and, later, the exit code. Closing the pipe gives the process up, and
the nursery kills it. If the nursery dies, its processes die too, pipes end without an exit code, and the next start
makes a new nursery.
"""

import asyncio
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.environment import DEVICES
from instgenie.machine.curve import SECRET
from instgenie.telemetry.traces import NODE

FORKS_CUDA = False  # True: processes on CUDA devices are forked, too
MAX_NURSERIES = 2
LATE = {SECRET, NODE}  # variables that nothing reads while it is imported
OWN = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's library starts no thread; workers multiply no large matrices with numpy
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch counts devices without CUDA, which cannot be used after a fork
}


class ForkedProcess:
    def __init__(self, pid: int, report: "ForkReport") -> None:
        self.pid = pid
        self._report = report

    @property
    def is_alive(self) -> bool:
        return not self._report.code.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._report.code)

    def kill(self) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkReport(asyncio.Protocol):
    """What a nursery says about one process, line by line."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[list[str]] = loop.create_future()  # two words
        self.code: asyncio.Future[int] = loop.create_future()
        self._rest = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data.decode()).split("\n")
        for line in lines:
            words = line.split(" ", 1)
            if words[0] == "ended":
                self.code.set_result(int(words[1]))
            else:
                self.first.set_result(words)
            if words[0] != "forked":
                self.close()

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """The nursery has said everything, or has died."""
        if not self.first.done():
            self.first.set_result(["refused", "the nursery has died"])
        if not self.code.done():
            self.code.set_result(-signal.SIGKILL)


class Nursery:
    """A nursery as a launcher sees it. Starts at once; requests wait until it has imported everything."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {**OWN, **environment}
        self.is_fit = True
        self._requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "instgenie.workers.nursery", str(os.getpid())]
        with other:
            self._process = subprocess.Popen(command, stdin=other.fileno(), env=self.environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def fork(
        self, role: Role, config: ProcessConfig, environment: Mapping[str, str], stdin: int
    ) -> ForkedProcess | None:
        """Fork a process; None if the nursery is not fit for it. Raises an OSError if that is not possible now."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        _, report = await loop.connect_read_pipe(ForkReport, os.fdopen(reading, "rb", 0))
        try:
            self._request(role, config, environment, [stdin, 1, 2], writing)
            kind, told = await report.first
        except BaseException:
            report.close()
            raise
        if kind == "forked":
            return ForkedProcess(int(told), report)
        if kind == "refused":
            raise OSError(told)
        self.is_fit = False
        return None

    def _request(
        self, role: Role, config: ProcessConfig, environment: Mapping[str, str], files: list[int], report: int
    ) -> None:
        names = self.environment.keys() | environment.keys()
        others = {name: environment.get(name) for name in names if environment.get(name) != self.environment.get(name)}
        request = {"role": role, "config": msgspec.json.encode(config).decode(), "environment": others}
        with os.fdopen(report, "wb"), open_folder(".") as folder:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*files, folder, report])

    def retire(self) -> None:
        """Send no more requests: it ends after its last process."""
        self._requests.close()

    def end(self) -> None:
        """End it and its processes at once."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


class Nurseries:
    """The nurseries of this process, those used last at the end."""

    def __init__(self) -> None:
        self._active: list[Nursery] = []
        self._retired: list[Nursery] = []
        self._choosing = threading.Lock()

    def choose(self, environment: Mapping[str, str]) -> Nursery:
        """The nursery for processes with this environment."""
        wanted = OWN | nursery_environment(environment)
        with self._choosing:
            self._retired = [nursery for nursery in self._retired if nursery.is_alive]
            able = [nursery for nursery in self._active if nursery.is_alive]
            found = next((nursery for nursery in able if nursery.environment == wanted), None) or Nursery(wanted)
            kept = [*(nursery for nursery in able if nursery is not found), found][-MAX_NURSERIES:]
            for nursery in self._active:
                if nursery not in kept:
                    nursery.retire()
                    self._retired.append(nursery)
            self._active = kept
            return found

    def end_all(self) -> None:
        for nursery in (*self._active, *self._retired):
            nursery.end()


@contextmanager
def open_folder(path: str) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def nursery_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be the same in a nursery as in its processes, because they are read by what is imported.
    A nursery for processes without a GPU sees none itself; others may see all."""
    sees_none = environment.get(DEVICES) == ""
    return {name: value for name, value in environment.items() if name not in LATE and (name != DEVICES or sees_none)}


def can_fork(device: str) -> bool:
    """Whether processes for this device are forked on this machine."""
    if sys.platform != "linux" or not (device == "cpu" or FORKS_CUDA):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # this kernel has none
        return False
    return True


nurseries = Nurseries()
atexit.register(nurseries.end_all)

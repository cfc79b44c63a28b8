"""A launcher whose processes are played by tasks of the test: they speak over the real socket, and do what the test
scripts for each start."""

import asyncio
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable
from tempfile import mkdtemp

import zmq
import zmq.asyncio

from helpers.fake_cluster import FACTS
from instgenie.cluster import wire
from instgenie.cluster.config import ProcessConfig, Role

PIDS = itertools.count(10**9)  # of no real process


class PlayedProcess:
    """Says a first message, or ends without one. Unless it is broken, it lives until it is killed or told to stop, and
    is ready when it is told to begin."""

    def __init__(self, config: ProcessConfig, says: wire.Message | None) -> None:
        self.pid = next(PIDS)
        self.config = config
        self.budgets: list[int] = []  # of main memory, as it was told
        self._task = asyncio.create_task(self._play(says))

    @property
    def is_alive(self) -> bool:
        return not self._task.done()

    async def wait(self) -> int:
        await asyncio.wait([self._task])
        return -9 if self._task.cancelled() else 1

    def kill(self) -> None:
        self._task.cancel()

    async def _play(self, says: wire.Message | None) -> None:
        if says is None:
            return
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 1000)
            socket.setsockopt(zmq.IDENTITY, self.config.name.encode())
            socket.connect(self.config.endpoint)
            await socket.send(wire.encode(says))
            if isinstance(says, wire.Broken):
                await asyncio.sleep(0.05)  # it is heard before the end is seen
                return
            while True:
                head, *_ = await socket.recv_multipart()
                match wire.decode(head):
                    case wire.Begin(host_bytes):
                        self.budgets.append(host_bytes)
                        await socket.send(wire.encode(READY))
                    case wire.Stop():
                        return


READY, LOADED, DEATH = wire.Ready(FACTS, "digest"), wire.Loaded(), None
LOADING = wire.Beat()  # a sign of life, and then nothing


class ScriptedLauncher:
    """The script has the first message of each start of a worker's process; the last is repeated."""

    def __init__(self, script: Callable[[int, Role], list[wire.Message | None]]) -> None:
        self.script = script
        self.memory = 2.0**30
        self.node_memory: dict[int, float] = {}  # of workers whose nodes have another memory
        self.starts: defaultdict[tuple[int, Role], list[PlayedProcess]] = defaultdict(list)

    secret = ""
    shares_devices = True

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        return self.memory if worker is None else self.node_memory.get(worker, self.memory)

    def open(self) -> str:
        self.folder = mkdtemp(prefix="played-")
        return f"ipc://{self.folder}/cluster"

    def endpoint(self, bound: str) -> str:
        return bound

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> PlayedProcess:
        started = self.starts[worker, role]
        lines = self.script(worker, role)
        started.append(PlayedProcess(config, lines[min(len(started), len(lines) - 1)]))
        return started[-1]

    def release(self) -> bool:
        return False

    def close(self) -> None:
        shutil.rmtree(self.folder)

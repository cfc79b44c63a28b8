"""The launcher of one front: it has the node actors start the processes of slots, or attach this front to those that
run. Its calls to Ray are awaited; none holds up the event loop."""

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from instgenie.cluster.config import ProcessConfig, Role
from instgenie.cluster.launch import NODE_LOST
from instgenie.cluster.ray.names import Directive, NodeFacts, SlotInfo, slot_name
from instgenie.machine.version import package_version

SECONDS_BETWEEN_TRIES = 0.5
SILENT_SECONDS = 3.0  # without a sign of life, after which a process whose actor cannot be reached counts as dead

log = logging.getLogger(__name__)


class RayProcess:
    """A process of a slot, as one front sees it."""

    def __init__(self, node: Any, role: Role, pid: int, silence: Callable[[], float]) -> None:
        """`silence`: the seconds since the front has heard of it."""
        self.pid = pid
        self._node = node
        self._role = role
        self._silence = silence
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch())

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it, and count it as dead at once: its node may be out of reach."""
        if self.is_alive:
            self._node.kill.remote(self._role, self.pid)
            self.give_up(NODE_LOST)

    def give_up(self, code: int) -> None:
        """Count it as ended, whatever it does."""
        if not self._ended.done():
            self._ended.set_result(code)
        self._watching.cancel()

    async def _watch(self) -> None:
        """Wait for its end or its node's. An actor that is out of reach for Ray is no reason to give up a process that
        still speaks."""
        while True:
            try:
                code = await self._node.wait.remote(self._role, self.pid)
                break
            except ActorDiedError:
                code = None
                break
            except (RayError, ConnectionError):
                if self._silence() > SILENT_SECONDS:
                    code = None
                    break
            await asyncio.sleep(SECONDS_BETWEEN_TRIES)
        if not self._ended.done():
            self._ended.set_result(NODE_LOST if code is None else code)


class RayLauncher:
    shares_devices = False  # each slot has its own

    def __init__(self, controller: Any, secret: str, host: str, namespace: str) -> None:
        """`host`: the address of this machine that nodes can reach."""
        self.controller = controller
        self.secret = secret
        self.front = uuid.uuid4().hex
        self.address = ""  # of this front, once it is bound
        self.slots: dict[int, SlotInfo] = {}
        self.silence: Callable[[int, Role], float] = lambda worker, role: math.inf  # set by the liaison
        self._host = host
        self._namespace = namespace
        self._nodes: dict[int, Any] = {}  # actors, by slot
        self._processes: dict[tuple[int, Role], RayProcess] = {}
        self._changed = asyncio.Condition()
        self._released = asyncio.Event()

    # the cluster asks

    def worker_bytes(self, num_workers: int, worker: int | None = None) -> float:
        info = None if worker is None else self.slots.get(worker)
        return info.facts.available_bytes / info.num_neighbours if info and info.facts else math.inf

    def open(self) -> str:
        return f"tcp://{self._host}:*"

    def endpoint(self, bound: str) -> str:
        self.address = bound
        return bound

    async def start(self, worker: int, role: Role, config: ProcessConfig) -> RayProcess:
        """Wait until the slot has a node, and have its process serve this front."""
        starting = asyncio.create_task(self._start(worker, role, config))
        released = asyncio.create_task(self._released.wait())
        try:
            await asyncio.wait([starting, released], return_when=asyncio.FIRST_COMPLETED)
            if self._released.is_set():  # a process that is attached since then is not this front's to kill
                raise OSError("this front leaves the cluster")
            return starting.result()
        finally:
            starting.cancel()
            released.cancel()

    async def _start(self, worker: int, role: Role, config: ProcessConfig) -> RayProcess:
        encoded = msgspec.json.encode(replace(config, front=self.front, has_control=True))
        while True:
            node = await self._node_of(worker)
            try:
                pid = await node.start.remote(role, encoded, package_version())
            except RayTaskError as error:
                raise OSError(str(error.cause)) from None
            except ActorDiedError:
                self._forget(worker, node)
            except RayActorError:
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)  # Ray starts it again
            else:
                process = RayProcess(node, role, pid, lambda: self.silence(worker, role))
                self._processes[worker, role] = process
                return process

    def release(self) -> bool:
        self._released.set()
        self.give_up_all(0)
        return True

    def close(self) -> None:
        """Everything ends with the connection to Ray."""

    # the liaison tells

    async def take(self, directive: Directive) -> None:
        """Note which slots exist."""
        if not directive.is_known:
            self.give_up_all(NODE_LOST)
        self.slots = {info.index: info for info in directive.slots}
        for index in self.slots.keys() - self._nodes.keys():
            try:
                self._nodes[index] = await asyncio.to_thread(ray.get_actor, slot_name(index), self._namespace)
            except ValueError:  # it has ended since
                continue
        async with self._changed:
            self._changed.notify_all()

    def give_up_all(self, code: int) -> None:
        for process in self._processes.values():
            process.give_up(code)

    async def leave(self, timeout: float) -> None:
        """Tell the controller that this front ends. The last front waits until the workers have ended."""
        try:
            async with asyncio.timeout(timeout):
                await self.controller.leave.remote(self.front, timeout)
        except (RayError, TimeoutError) as error:
            log.info("left the cluster", extra={"reason": type(error).__name__})

    # slots

    def facts_of(self, worker: int) -> NodeFacts | None:
        """Where a worker is; None: it waits for a node."""
        info = self.slots.get(worker)
        return info.facts if info else None

    async def _node_of(self, worker: int) -> Any:
        async with self._changed:
            await self._changed.wait_for(lambda: worker in self._nodes and worker in self.slots)
        return self._nodes[worker]

    def _forget(self, worker: int, node: Any) -> None:
        if self._nodes.get(worker) is node:
            del self._nodes[worker]

"""Between a front and the controller: tells the controller what the front needs, and the front which workers drain. A
controller that does not answer changes nothing; the last directive stands."""

import asyncio
import logging
import time

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayError

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import Role
from instgenie.cluster.processes import place
from instgenie.cluster.ray.launcher import RayLauncher
from instgenie.cluster.ray.names import SECONDS_BETWEEN_REPORTS, Directive, FrontReport
from instgenie.cluster.status import NodeStatus
from instgenie.scheduling.router import WorkerLoad

SECONDS_TO_ANSWER = 10.0
SECONDS_TO_HOPE = 30.0  # that Ray starts a controller again which has died

log = logging.getLogger(__name__)


class Liaison:
    def __init__(self, launcher: RayLauncher, cluster: Cluster) -> None:
        self.launcher = launcher
        self.cluster = cluster
        launcher.silence = self._silence
        self._is_away = False
        self._heard_at = 0.0
        self._leaving: dict[int, int] = {}  # slots that drain, and how often they have begun to
        self._reporting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._reporting = asyncio.create_task(self._run())

    async def stop(self, timeout: float) -> None:
        """Leave the cluster, and then Ray."""
        if self._reporting:
            self._reporting.cancel()
        await self.launcher.leave(timeout)
        await asyncio.to_thread(ray.shutdown)

    async def _run(self) -> None:
        while True:
            try:
                await self._exchange()
            except Exception:  # the next exchange may succeed
                log.exception("the exchange with the controller failed")
            await asyncio.sleep(SECONDS_BETWEEN_REPORTS)

    async def _exchange(self) -> None:
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                answer = await self.launcher.controller.report.remote(msgspec.json.encode(self._report()))
        except (RayError, TimeoutError) as error:
            if not self._is_away:
                log.warning("the controller does not answer", extra={"reason": type(error).__name__})
            self._is_away = True
            is_late = time.monotonic() - self._heard_at > SECONDS_TO_HOPE
            self.cluster.is_abandoned = isinstance(error, ActorDiedError) and is_late
            return
        self._is_away, self._heard_at, self.cluster.is_abandoned = False, time.monotonic(), False
        directive = msgspec.json.decode(answer, type=Directive)
        await self.launcher.take(directive)
        self._place(directive)
        self._leaving = {
            slot.index: slot.num_drains for slot in directive.slots if slot.state in ("draining", "ending")
        }
        for worker in self.cluster.workers:
            worker.drain(worker.index in self._leaving)

    def _place(self, directive: Directive) -> None:
        """Tell the cluster where its workers are, and which fronts share them."""
        found = {info.index: info.facts for info in directive.slots if info.facts}
        place(self.cluster.workers, {index: facts.name for index, facts in found.items()})
        nodes = {facts.name: facts for facts in found.values()}
        self.cluster.nodes = tuple(
            NodeStatus(name, facts.address, facts.num_cores, facts.available_bytes)
            for name, facts in sorted(nodes.items())
        )
        self.cluster.fronts = tuple(sorted(directive.fronts))

    def _report(self) -> FrontReport:
        workers = self.cluster.workers
        return FrontReport(
            front=self.launcher.front,
            endpoint=self.launcher.address,
            seconds=sum(own_seconds(worker.load) for worker in workers),
            num_edits=sum(len(worker.edits) for worker in workers),
            released=tuple(pair for pair in self._leaving.items() if not workers[pair[0]].has_work),
        )

    def _silence(self, worker: int, role: Role) -> float:
        return time.monotonic() - self.cluster.workers[worker].processes[role].heard_at


def own_seconds(load: WorkerLoad) -> float:
    """The share of a worker's work that this front has given to it; the others report theirs."""
    return load.seconds * load.own.num_steps / load.num_steps if load.num_steps else 0.0

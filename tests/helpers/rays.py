"""A real Ray cluster on this machine: a head without room for workers, and nodes that tests add, stop and kill."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.ray.connect import connect
from instgenie.cluster.ray.ledger import RayLedger
from instgenie.cluster.ray.liaison import Liaison
from instgenie.cluster.ray.names import ClusterSettings, RayConfig
from instgenie.scheduling.autoscaler import ScalingConfig

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_DEDUP_LOGS": "0"}
STORE_BYTES = 100 * 2**20
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 6}


class RayNodes:
    """The head has one core and no resource `slot`; each further node has one core and one `slot`."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = RayCluster(True, head_node_args=head | {"_system_config": HEALTH})
        self.address: str = self._cluster.address

    def add(self, num_slots: int = 1) -> Any:
        """Join one more node, and return it."""
        return self._cluster.add_node(
            wait=True, num_cpus=num_slots, resources={"slot": num_slots}, object_store_memory=STORE_BYTES
        )

    @property
    def nodes(self) -> list[Any]:
        return [node for node in self._cluster.list_all_nodes() if node is not self._cluster.head_node]

    def find(self, id: str) -> Any:
        """The node with an id of Ray's."""
        [found] = [node for node in self.nodes if node.node_id == id]
        return found

    def processes(self, node: Any) -> list[psutil.Process]:
        """The raylet of a node and all that it started, the raylet first."""
        [raylet] = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
        return [raylet, *raylet.children(recursive=True)]

    def kill(self, node: Any) -> None:
        """End a node and its processes at once, without a word."""
        with suppress(psutil.NoSuchProcess):  # its raylet has ended by itself
            for process in self.processes(node):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    @contextmanager
    def stopped(self, node: Any) -> Iterator[None]:
        """Nothing on the node runs while the block does: to others it looks like a cable that was pulled."""
        processes = self.processes(node)
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def stop(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Everything that is started here has ended when the block is left, also by an error."""
    os.environ.update(QUIET)
    before = set(psutil.pids())
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.stop()
        for process in psutil.process_iter():
            if process.pid not in before and is_ours(process):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def is_ours(process: psutil.Process) -> bool:
    """True for a process of Ray below this one."""
    with suppress(psutil.Error):
        is_below = any(parent.pid == os.getpid() for parent in process.parents())
        return is_below and "ray" in " ".join(process.cmdline())
    return False


def make_settings(name: str, scaling: ScalingConfig, address: str, **fields: Any) -> RayConfig:
    """How a front of the test joins; each slot takes the core of a node that is not the head."""
    told = {"model": "tiny", "config": {}, "front_timeout": 30.0, "linger": 30.0} | fields
    return RayConfig(address, name, ClusterSettings(resources={"CPU": 1.0, "slot": 1.0}, scaling=scaling, **told))


class RayFront:
    """A cluster on Ray as one front has it, in this process."""

    def __init__(self, config: ClusterConfig, ray_config: RayConfig) -> None:
        self.launcher = connect(ray_config)
        self.cluster = Cluster(config, self.launcher, RayLedger(config.hold_seconds))
        self.liaison = Liaison(self.launcher, self.cluster)

    async def start(self) -> None:
        await self.cluster.start()
        self.liaison.start()

    async def stop(self) -> None:
        await self.cluster.stop(10)
        await self.liaison.stop(10)

    def node_of(self, worker: int) -> str:
        """The id of a worker's node."""
        facts = self.launcher.facts_of(worker)
        assert facts is not None
        return facts.node

    @property
    def nodes(self) -> set[str]:
        """The ids of all workers' nodes."""
        return {info.facts.node for info in self.launcher.slots.values() if info.facts}

    @property
    def num_ready(self) -> int:
        return sum(worker.takes_edits for worker in self.cluster.workers)

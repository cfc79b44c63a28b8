"""How a cluster is set up: frozen, complete, and the same for everyone who reads it."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from instgenie.machine.memory import available_memory
from instgenie.scheduling.names import ONE_PROCESS, Batching
from instgenie.scheduling.router import Policy
from instgenie.types import CacheDtype, PlanPolicy

Role = Literal["prepare", "denoise", "finish"]

NUM_ENCODERS = 4  # threads of a finish process that encode pictures while the next is decoded
UNTOLD_HOST_BYTES = 16 * 2**30  # where the system does not say how much there is


@dataclass(frozen=True)
class CacheConfig:
    """Where activations are kept, and how much of them. Memory is each worker's own; disk and remote are shared."""

    gpu_bytes: int | None = None  # None: half of what is free beside the model; none where there is no CUDA device
    host_bytes: int | None = None  # None: a worker's share of half of what is available when the cluster is made
    disk: str | None = None  # folder; None: nothing is kept on disk
    disk_bytes: int = 100 * 2**30
    remote: str | None = None  # any fsspec URL; None: nothing is kept there
    remote_bytes: int = 1000 * 2**30
    dtype: CacheDtype = "model"

    @property
    def is_lasting(self) -> bool:
        """Whether anything outlives a worker."""
        return self.disk is not None or self.remote is not None


@dataclass(frozen=True)
class ClusterConfig:
    model: str = "builtin"
    devices: tuple[str, ...] = ("auto",)  # one worker each
    dtype: str = "auto"
    max_batch_size: int = 8  # jobs that take a step together on one worker
    max_queue: int = 64  # edits that wait; one more is refused
    cache: CacheConfig = CacheConfig()
    policy: Policy = "mask_aware"  # of the router
    batching: Batching = "continuous"
    graphs: bool = True  # whether passes are captured as CUDA graphs, on devices that have them
    plan: PlanPolicy = "cached"  # of the blocks of edits that reuse; any other lets pictures depend on the load
    reuse: bool = True  # whether templates are registered; without, every edit computes every token
    worker_timeout: float = 120.0  # seconds without a sign of life after which a process is taken for hung
    start_timeout: float = 1800.0  # the same while it loads the model

    @property
    def roles(self) -> tuple[Role, ...]:
        """The processes of a worker."""
        return ("denoise",) if self.batching in ONE_PROCESS else ("prepare", "denoise", "finish")


@dataclass(frozen=True)
class ProcessConfig:
    """What one process of a worker is told when it is started."""

    name: str  # unique, of this start of the process
    role: Role
    parent: int  # pid: it does not outlive it
    endpoint: str
    model: str
    device: str
    dtype: str
    max_batch_size: int
    batching: Batching
    cache: CacheConfig
    plan: PlanPolicy = "cached"
    graphs: bool = True


def finish_period(seconds: float, thread_seconds: float) -> float:
    """Seconds from one picture to the next where one after the other is decoded, and threads encode them."""
    return max(seconds, thread_seconds / NUM_ENCODERS)


def resolve_host_bytes(config: ClusterConfig) -> ClusterConfig:
    """The one place where it is chosen: all who hear of it hear the same number."""
    if config.cache.host_bytes is not None:
        return config
    share = available_memory() / 2 / len(config.devices)
    host_bytes = int(share) if math.isfinite(share) else UNTOLD_HOST_BYTES
    return replace(config, cache=replace(config.cache, host_bytes=host_bytes))

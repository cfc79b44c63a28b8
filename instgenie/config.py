"""How a cluster is set up: frozen, complete, and the same for everyone who reads it."""

from dataclasses import dataclass
from typing import Literal

from instgenie.router import Policy

Batching = Literal["continuous", "static", "naive"]
Role = Literal["prepare", "denoise", "finish"]


@dataclass(frozen=True)
class ClusterConfig:
    model: str = "builtin"
    devices: tuple[str, ...] = ("auto",)  # one worker each
    dtype: str = "auto"
    max_batch_size: int = 8  # jobs that take a step together on one worker
    max_queue: int = 64  # edits that wait; one more is refused
    cache_dir: str | None = None  # for activations on disk
    host_cache_bytes: int = 16 * 2**30  # for the activations that a worker keeps in memory
    policy: Policy = "mask_aware"  # of the router
    batching: Batching = "continuous"
    reuse: bool = True  # whether templates are registered; without, every edit computes every token
    worker_timeout: float = 120.0  # seconds without a sign of life after which a process is taken for hung
    start_timeout: float = 1800.0  # the same while it loads the model

    @property
    def roles(self) -> tuple[Role, ...]:
        """The processes of a worker; the naive loop does everything itself."""
        return ("denoise",) if self.batching == "naive" else ("prepare", "denoise", "finish")


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
    cache_bytes: int

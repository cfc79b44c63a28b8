"""Reports of a cluster about itself: a snapshot for pages, events for metrics. Knows no process."""

from dataclasses import dataclass, field
from typing import Literal

from instgenie.cluster.orders import Facts, FailureKind
from instgenie.types import TierName

ProcessState = Literal["starting", "ready", "down", "failed"]


@dataclass(frozen=True)
class JobStatus:
    id: str
    step: int
    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int  # per step
    plan: tuple[bool, ...]  # per block, True if it is cached; empty: no block is
    slack: float | None = None  # seconds that are left beyond its remaining steps; None: it has no deadline
    num_preemptions: int = 0  # times that it left the batch for another


@dataclass(frozen=True)
class ControlNetsStatus:
    """The ControlNets in a process."""

    num_kept: int
    num_bytes: int
    num_loads: int  # since it started


@dataclass(frozen=True)
class ProcessStatus:
    role: str
    pid: int | None  # on its own node; None: not running
    state: ProcessState
    num_starts: int
    message: str  # why it is down
    controlnets: ControlNetsStatus | None = None  # of a process of ControlNets

    @property
    def num_restarts(self) -> int:
        return max(self.num_starts - 1, 0)


@dataclass(frozen=True)
class NodeStatus:
    """A machine with workers."""

    name: str  # unique in the cluster
    address: str
    num_cores: int
    available_bytes: float  # of main memory


@dataclass(frozen=True)
class WorkerStatus:
    index: int
    device: str
    node: str  # its name; empty: this machine, or none yet
    is_draining: bool  # it gets no more edits, and ends when it has no work
    num_fronts: int  # that share it; 0: this one alone
    state: ProcessState
    processes: tuple[ProcessStatus, ...]
    running: tuple[JobStatus, ...]
    num_waiting: int
    steps_per_second: float
    last_step_seconds: float
    num_steps: int  # since it started
    num_interruptions: int  # of the step loop, by other work while jobs were running
    num_joined: int  # jobs that began to take steps, of all fronts, since its denoise process started
    predicted_seconds: float  # until all its work is done
    seconds_per_step: float  # fixed cost of a step
    seconds_per_token: float  # additional cost of each computed token
    templates: tuple[str, ...]
    tier_bytes: dict[TierName, int]
    lora_bytes: dict[str, int] = field(default_factory=dict)  # of LoRAs in memory, by tier

    @property
    def pid(self) -> int | None:
        """The pid of the denoise process."""
        return next(process.pid for process in self.processes if process.role == "denoise")


@dataclass(frozen=True)
class ClusterStatus:
    workers: tuple[WorkerStatus, ...]
    nodes: tuple[NodeStatus, ...]  # empty: all workers are on this machine
    fronts: tuple[str, ...]  # addresses of all fronts, this one among them; empty: there is no other
    num_waiting: int
    num_running: int
    num_registrations_waiting: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_cache_queries: int
    cache_hits: dict[TierName, int]
    services: tuple[ProcessStatus, ...] = ()  # processes of ControlNets, and companions of workers

    @property
    def num_restarts(self) -> int:
        own = [process for worker in self.workers for process in worker.processes]
        return sum(process.num_restarts for process in (*own, *self.services))


class Observer:
    """Receives events as they happen; override the methods of interest."""

    def step(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        """A batch took a step, `between` seconds after its last one."""

    def joined(self, worker: int, job: JobStatus) -> None:
        """A job joined the running batch."""

    def left(self, worker: int, job: str) -> None:
        """A job left the batch, finished or not."""

    def preempted(self, worker: int, job: str, by: str) -> None:
        """A job left the batch for another, and waits again."""

    def accepted(self, mask_ratio: float) -> None:
        """An edit was accepted."""

    def cache_query(self, tier: TierName | None) -> None:
        """An edit looked for its template's activations; None is a miss."""

    def lora_loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A worker brought a LoRA near its steps, from main memory or from disk."""

    def fetched(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        """A worker brought a template into its memory from a tier below it, or from a peer."""

    def finished(self, facts: Facts, seconds: float) -> None:
        """An edit was answered with a picture, `seconds` after it was accepted."""

    def failed(self, kind: FailureKind) -> None:
        """An edit was answered with a failure."""

    def cancelled(self) -> None:
        """An edit was cancelled by its client."""

"""What a cluster says about itself: a snapshot for a page, facts for metrics. Knows no process."""

from dataclasses import dataclass
from typing import Literal

from instgenie.cluster.orders import Facts, FailureKind, Tier

ProcessState = Literal["starting", "ready", "down", "failed"]


@dataclass(frozen=True)
class JobStatus:
    id: str
    step: int
    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    num_computed_tokens: int
    plan: tuple[bool, ...]  # for each block, whether it is cached; empty: none is


@dataclass(frozen=True)
class ProcessStatus:
    role: str
    pid: int | None
    state: ProcessState
    num_starts: int
    message: str  # of why it is down


@dataclass(frozen=True)
class WorkerStatus:
    index: int
    device: str
    state: ProcessState
    processes: tuple[ProcessStatus, ...]
    running: tuple[JobStatus, ...]
    num_waiting: int
    steps_per_second: float
    last_step_seconds: float
    num_steps: int  # taken since it started
    num_interruptions: int  # of the step loop, by other work while jobs were running
    predicted_seconds: float  # until all it has is done
    seconds_per_step: float  # a step takes so long, however many tokens it computes
    seconds_per_token: float  # and so much longer for each of them
    templates: tuple[str, ...]
    tier_bytes: dict[Tier, int]

    @property
    def pid(self) -> int | None:
        """Of the process that takes the steps."""
        return next(process.pid for process in self.processes if process.role == "denoise")


@dataclass(frozen=True)
class ClusterStatus:
    workers: tuple[WorkerStatus, ...]
    num_waiting: int
    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_restarts: int
    num_cache_queries: int
    cache_hits: dict[Tier, int]


class Observer:
    """Told of facts as they happen; override what you want to hear."""

    def step(self, worker: int, seconds: float, batch_size: int) -> None:
        """A batch took a step."""

    def joined(self, worker: int, job: JobStatus) -> None:
        """A job joined the running batch."""

    def left(self, worker: int, job: str) -> None:
        """A job is out of the batch, finished or not."""

    def accepted(self, mask_ratio: float) -> None:
        """An order was accepted."""

    def cache_query(self, tier: Tier | None) -> None:
        """An order looked for its template's activations; None is a miss."""

    def finished(self, facts: Facts, seconds: float) -> None:
        """An order was answered with a picture, so many seconds after it was accepted."""

    def failed(self, kind: FailureKind) -> None:
        """An order was answered with a failure."""

    def cancelled(self) -> None:
        """An order's client is gone."""

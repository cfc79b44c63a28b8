"""Recent activity of the engine, for the engine page: jobs that joined and left batches, steps, latencies, mask ratios.
Learns it as an observer of the cluster; keeps no picture, prompt or key."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Facts
from instgenie.cluster.status import JobStatus, Observer, WorkerStatus

WINDOW = 30.0  # seconds shown in the timeline
RECENT = 300.0  # seconds covered by percentiles and mask ratios
MAX_REMEMBERED = 2000  # entries per kind
NUM_BINS = 10
MAX_PREEMPTIONS = 8  # shown


@dataclass
class JobBar:
    """The stay of a job in a batch, a bar in the timeline."""

    job: str
    joined: float
    left: float | None  # None: it is still in the batch
    is_cached: bool
    step: int  # at which it joined
    num_steps: int
    num_tokens: int
    num_masked_tokens: int
    made_way: bool = False  # it left for another job


@dataclass(frozen=True)
class StepRecord:
    ended: float
    seconds: float
    batch_size: int
    between: float  # seconds since the step before; 0 after an idle time


@dataclass(frozen=True)
class Preemption:
    """A job left a batch for another."""

    at: float
    worker: int
    job: str
    by: str


class Pulse(Observer):
    def __init__(self, cluster: Cluster, model_name: str) -> None:
        self.cluster = cluster
        self.model_name = model_name  # the name clients see: the model itself may be a folder
        self.bars: dict[int, deque[JobBar]] = defaultdict(lambda: deque(maxlen=MAX_REMEMBERED))
        self.steps: dict[int, deque[StepRecord]] = defaultdict(lambda: deque(maxlen=MAX_REMEMBERED))
        self.latencies: deque[tuple[float, float]] = deque(maxlen=MAX_REMEMBERED)
        self.mask_ratios: deque[tuple[float, float]] = deque(maxlen=MAX_REMEMBERED)
        self.met: deque[tuple[float, float]] = deque(maxlen=MAX_REMEMBERED)  # 1 for a deadline that was met, else 0
        self.preemptions: deque[Preemption] = deque(maxlen=MAX_PREEMPTIONS)
        cluster.observe(self)

    def step(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        self.steps[worker].append(StepRecord(time.monotonic(), seconds, batch_size, between))

    def joined(self, worker: int, job: JobStatus) -> None:
        is_cached, sizes = any(job.plan), (job.num_tokens, job.num_masked_tokens)
        self.bars[worker].append(JobBar(job.id, time.monotonic(), None, is_cached, job.step, job.num_steps, *sizes))

    def left(self, worker: int, job: str) -> None:
        for bar in self.bars[worker]:
            if bar.job == job and bar.left is None:
                bar.left = time.monotonic()

    def accepted(self, mask_ratio: float) -> None:
        self.mask_ratios.append((time.monotonic(), mask_ratio))

    def finished(self, facts: Facts, seconds: float) -> None:
        self.latencies.append((time.monotonic(), seconds))
        if facts.in_time is not None:
            self.met.append((time.monotonic(), float(facts.in_time)))

    def preempted(self, worker: int, job: str, by: str) -> None:
        self.preemptions.append(Preemption(time.monotonic(), worker, job, by))
        for bar in [bar for bar in self.bars[worker] if bar.job == job][-1:]:
            bar.made_way = True

    def snapshot(self, since: float) -> dict[str, Any]:
        """Return the whole state to show, with only those steps that ended after `since`."""
        now = time.monotonic()
        status, config, model = self.cluster.status(), self.cluster.config, self.cluster.model_facts
        seconds = recent(self.latencies, now)
        return {
            "now": now,
            "window": WINDOW,
            "model": {"name": self.model_name, "num_blocks": model.num_blocks, "dtype": model.dtype} if model else None,
            "max_batch_size": config.max_batch_size,
            "max_queue": config.max_queue,
            "cache_bytes": self.cluster.host_bytes if config.reuse else 0,
            "num_waiting": status.num_waiting,
            "num_registrations_waiting": status.num_registrations_waiting,
            "num_running": status.num_running,
            "num_finished": status.num_finished,
            "num_failed": status.num_failed,
            "num_cancelled": status.num_cancelled,
            "num_restarts": status.num_restarts,
            "requests_per_second": sum(now - at < 60 for at, _ in self.latencies) / 60,
            "latency": {name: percentile(seconds, share) for name, share in PERCENTILES.items()},
            "attainment": sum(met) / len(met) if (met := recent(self.met, now)) else None,
            "num_deadlines": len(met),
            "prediction_error": self.cluster.predictor.error,
            "scheduling": config.scheduling,
            "preemptions": [asdict(one) for one in self.preemptions],
            "mask_ratios": histogram(recent(self.mask_ratios, now)),
            "num_cache_queries": status.num_cache_queries,
            "cache_hits": status.cache_hits,
            "workers": [self.describe(worker, now, since) for worker in status.workers],
        }

    def describe(self, worker: WorkerStatus, now: float, since: float) -> dict[str, Any]:
        """Describe a worker. Of its templates only the number is shown: they are private to their tenants."""
        shown = [bar for bar in self.bars[worker.index] if bar.left is None or now - bar.left < WINDOW]
        start = max(since, now - WINDOW)
        facts = asdict(worker) | {"num_templates": len(worker.templates)}
        del facts["templates"]
        return facts | {
            "bars": [asdict(bar) for bar in shown],
            "steps": [asdict(step) for step in self.steps[worker.index] if step.ended > start],
        }


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def recent(values: Sequence[tuple[float, float]], now: float) -> list[float]:
    return [value for at, value in values if now - at < RECENT]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else None


def histogram(ratios: Sequence[float]) -> list[int]:
    counts = [0] * NUM_BINS
    for ratio in ratios:
        counts[min(int(ratio * NUM_BINS), NUM_BINS - 1)] += 1
    return counts

"""The time that a front spends on an edit and on a step, with the real coordinator and no sockets. The workers are
played: they are ready, hold full batches, and report steps."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import msgspec
import numpy as np

from instgenie.cluster import wire
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.coordinator import Coordinator
from instgenie.cluster.orders import Order
from instgenie.cluster.processes import Process, make_workers
from instgenie.cluster.wish import Wish
from instgenie.scheduling.router import Work
from instgenie.types import PixelMask

NUM_STEPS = 28
NUM_TOKENS = 4096
BATCH_SIZE = 8
MAX_FILLED = 1024  # workers that get a batch; further ones are idle
FACTS = wire.ModelFacts(
    name="played", family="flux", is_fill=False, own_size=1024, steps=NUM_STEPS, guidance=3.5, embeds_guidance=True,
    whole_strength=0.9, needs_true_guidance=True, patch=16, size_multiple=16, num_blocks=57, device="cuda",
    dtype="bfloat16",
)  # fmt: skip
JOB = wire.JobHead({}, (64, 64), 1.0, "FlowSchedule", msgspec.Raw(b"\x90"), (None,), ())


@dataclass(frozen=True)
class FrontTimes:
    """Seconds of CPU per call."""

    decision: Sequence[float]  # the choice of a worker, with the list of those that are ready
    accepting: Sequence[float]  # an edit, with its decision and its first message
    step: Sequence[float]  # a worker's message that its batch of eight took a step


class PlayedCluster:
    """A coordinator with ready workers, each with a full batch that runs."""

    def __init__(self, num_workers: int) -> None:
        config = ClusterConfig(model="played", devices=("cuda:0",) * num_workers, max_queue=10**9, auto_register=False)
        self.workers = make_workers(config)
        self.coordinator = Coordinator(config, self.workers, self.send)
        self.answers: deque[tuple[Process, wire.AnyMessage]] = deque()
        self.batches: list[list[wire.JobStep]] = [[] for _ in self.workers]
        for worker in self.workers:
            for role, process in worker.processes.items():
                process.state, worker.digests[role] = "ready", "weights"
        for process in self.workers[0].processes.values():
            self.coordinator.ready(process, FACTS, "weights")

    def send(self, process: Process, message: wire.Message, frames: Sequence[wire.Frame] = ()) -> None:
        """Prepare at once, and let jobs join at once."""
        match message:
            case wire.Prepare(id=id, attempt=attempt):
                self.answers.append((process, wire.Prepared(id, attempt, JOB, NUM_TOKENS, 400, NUM_STEPS, 0.01)))
            case wire.Denoise(jobs):
                steps = [wire.JobStep(job.id, job.attempt, 0) for job in jobs]
                self.batches[process.worker] += steps
                self.answers.append((process, wire.Joined(tuple(steps), ((),) * len(steps))))

    def accept(self, *orders: Order) -> None:
        self.coordinator.accept(orders)

    def answer_all(self) -> None:
        while self.answers:
            process, message = self.answers.popleft()
            self.coordinator.handle(process, message, [])

    def step(self, worker: int) -> None:
        message = wire.BatchStepped(0.05, 0.05, 0, tuple(self.batches[worker][:BATCH_SIZE]))
        self.coordinator.handle(self.workers[worker].denoiser, message, [])


def measure_front(num_workers: int, repeats: int) -> FrontTimes:
    cluster = PlayedCluster(num_workers)
    order = Order("me", np.zeros((64, 64, 3), np.uint8), half_mask(), Wish("a cat", seed=0, reuse="off"))
    for _ in range(min(num_workers, MAX_FILLED)):
        cluster.accept(*[order] * BATCH_SIZE)
        cluster.answer_all()
    busy = [index for index, batch in enumerate(cluster.batches) if len(batch) >= BATCH_SIZE]
    holders = range(0, num_workers, 2)
    works = [Work(NUM_STEPS, NUM_TOKENS, 400, "cat")]
    return FrontTimes(
        decision=[seconds_of(lambda: cluster.coordinator.placement.choose(works, holders)) for _ in range(repeats)],
        accepting=[seconds_of(lambda: cluster.accept(order)) for _ in range(repeats)],
        step=[seconds_of(partial(cluster.step, worker)) for worker in islice(cycle(busy), repeats)],
    )


def half_mask() -> PixelMask:
    mask = np.zeros((64, 64), np.bool_)
    mask[:32] = True
    return mask


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of this thread's CPU: what other processes of the machine take does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start

"""Runs a workload on a real cluster from this process and records latencies, facts and every step.

Uses the cluster's own interface, without HTTP. Several workers share a folder of activations, so that each finds what
another registered. On a CPU every process computes with one thread.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

from instgenie.bench.pictures import draw_mask, make_picture
from instgenie.bench.workload import Arrival
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Facts, Failed, Finished, Order
from instgenie.cluster.status import JobStatus, Observer
from instgenie.cluster.wish import Wish
from instgenie.errors import ServeError
from instgenie.pictures.picture import open_picture
from instgenie.types import Pixels

TENANT = "bench"
SECONDS_TO_STOP = 30.0
Out = TypeVar("Out")


@dataclass(frozen=True)
class Step:
    """One step of a worker."""

    worker: int
    seconds: float
    between: float  # since the step before; 0 after an idle time
    jobs: tuple[tuple[JobStatus, int], ...]  # each with the number of steps it had taken before


@dataclass(frozen=True)
class Served:
    """One edit of a workload and its answer."""

    arrival: Arrival
    latency: float
    facts: Facts


@dataclass(frozen=True)
class Run:
    """A cluster's answers to a workload, and to the practice workload before it, if there was one."""

    config: ClusterConfig
    rate: float  # edits per second
    practice: list[Served]
    practice_steps: list[Step]
    served: list[Served]
    steps: list[Step]


@dataclass(eq=False)
class Watch(Observer):
    """Records every step and its jobs."""

    steps: list[Step] = field(default_factory=list)
    running: dict[int, dict[str, JobStatus]] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def joined(self, worker: int, job: JobStatus) -> None:
        self.running.setdefault(worker, {})[job.id] = job
        self.taken[job.id] = job.step

    def left(self, worker: int, job: str) -> None:
        self.running[worker].pop(job, None)

    def step(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        jobs = tuple((job, self.taken[name]) for name, job in self.running.get(worker, {}).items())
        if len(jobs) == batch_size:
            self.steps.append(Step(worker, seconds, between, jobs))
        for job, _ in jobs:
            self.taken[job.id] += 1


@dataclass(eq=False)
class Session:
    """A running cluster that workloads can be sent to."""

    cluster: Cluster
    watch: Watch

    async def register(self, workload: Sequence[Arrival]) -> None:
        """Register every picture of the workload, then warm up each worker with an edit."""
        wanted = {(arrival.template, arrival.size, arrival.steps): arrival for arrival in workload}
        names = []
        if self.cluster.config.reuse:
            for arrival in wanted.values():
                picture = picture_of(arrival.template, arrival.size)
                names.append((await self.cluster.register(TENANT, picture, arrival.steps)).id)
        for name in names:
            while (status := self.cluster.template(TENANT, name)) and status.state != "ready":
                if status.state == "failed":
                    raise ServeError(f"a template could not be registered: {status.message}")
                await asyncio.sleep(0.02)
        await self.run([replace(arrival, at=0.0) for arrival in list(wanted.values())[:1] * len(self.cluster.workers)])

    async def run(self, workload: Sequence[Arrival], on_answer: Callable[[], None] = lambda: None) -> list[Served]:
        orders = [
            make_order(arrival) for arrival in workload
        ]  # made ahead: that takes longer than the gaps between arrivals
        start = time.perf_counter()

        async def send(arrival: Arrival, order: Order) -> Served:
            await asyncio.sleep(arrival.at - (time.perf_counter() - start))
            sent = time.perf_counter()
            [ticket] = self.cluster.submit([order])
            facts = await answer(ticket)
            on_answer()
            return Served(arrival, time.perf_counter() - sent, facts)

        return list(await asyncio.gather(*(send(*pair) for pair in zip(workload, orders, strict=True))))


def make_order(arrival: Arrival) -> Order:
    return Order(
        tenant=TENANT,
        picture=picture_of(arrival.template, arrival.size),
        mask=mask_of(arrival.mask_ratio, arrival.mask_shape, arrival.seed, arrival.size),
        wish=Wish("a photo of a flower", arrival.seed, steps=arrival.steps),
    )


@lru_cache(maxsize=64)
def picture_of(seed: int, size: tuple[int, int]) -> Pixels:
    return open_picture(make_picture(seed, size))


mask_of = lru_cache(maxsize=256)(draw_mask)  # cached, because every cluster gets the same edits


async def answer(ticket: Ticket) -> Facts:
    async for event in ticket.events():
        if isinstance(event, Finished):
            return event.facts
        if isinstance(event, Failed):
            raise ServeError(f"an edit failed: {event.message}")
    raise ServeError("an edit was dropped")


def in_session(config: ClusterConfig, work: Callable[[Session], Awaitable[Out]]) -> Out:
    """Start a cluster, wait for all its workers, do the work, and stop the cluster."""

    async def run(config: ClusterConfig) -> Out:
        cluster, watch = Cluster(config), Watch()
        cluster.observe(watch)
        await cluster.start()
        try:
            await cluster.until_ready()
            while not all(worker.is_ready for worker in cluster.workers):
                await asyncio.sleep(0.05)
                if cluster.failure:
                    raise ServeError(f"a worker cannot start: {cluster.failure}")
            return await work(Session(cluster, watch))
        finally:
            await cluster.stop(SECONDS_TO_STOP)

    with tempfile.TemporaryDirectory(prefix="instgenie-bench-") as folder, one_thread(config):
        shared = folder if len(config.devices) > 1 else None
        return asyncio.run(run(replace(config, cache=replace(config.cache, disk=shared))))


@contextmanager
def one_thread(config: ClusterConfig) -> Iterator[None]:
    """Make processes that are started for a CPU compute with one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    if all(device.startswith("cpu") for device in config.devices):
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before

"""Clusters of real processes, on tiny models. Faults come from a file that runs in nurseries before they fork
anything (`forkserver/sitecustomize.py`); the package itself has no switch for them."""

import asyncio
import io
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Event, Finished, Order
from instgenie.cluster.wish import Wish
from instgenie.types import Pixels

if TYPE_CHECKING:
    from instgenie.models.model import Model

QUIRK = "TESTS_QUIRK"  # the variable that names a file which worker processes run
FAULTS = """
    import os, signal
    import torch
    from instgenie.engine import loop, prepare

    advance, make_job = loop.Engine.advance, prepare.make_job

    def faulty_advance(self, jobs):
        prompts = [job.edit.prompt for job in jobs]
        if "death of steps" in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "poison of steps" in prompts:
            raise ValueError("poison")
        if "too large" in prompts or ("large" in prompts and len(jobs) > 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        advance(self, jobs)

    def faulty_make_job(edit, *others):
        if edit.prompt == "poison of prepare":
            raise ValueError("poison")
        job = make_job(edit, *others)
        if edit.prompt == "poison of finish":
            job.latents = job.latents[:, :1]  # this shape cannot be decoded
        return job

    loop.Engine.advance, prepare.make_job = faulty_advance, faulty_make_job
"""
WISHES = {field.name for field in fields_of(Wish)}
TENANT = "digest of a key"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def make_config(folder: Path, **fields: Any) -> ClusterConfig:
    return ClusterConfig(
        **{"model": str(folder), "devices": ("cpu",), "max_batch_size": 4, "worker_timeout": 10.0, "register_after": 1}
        | fields
    )


def make_order(seed: int = 0, picture_seed: int = 0, share: float = 0.3, **fields: Any) -> Order:
    picture = np.random.default_rng(picture_seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    mask = np.zeros((40, 48), np.bool_)
    mask[: round(40 * share**0.5), : round(48 * share**0.5)] = True
    asked = {"prompt": "a red cat", "seed": seed, "steps": 4}
    wish = Wish(**asked | {name: fields.pop(name) for name in list(fields) if name in WISHES})
    return Order(**{"tenant": TENANT, "picture": picture, "mask": mask, "wish": wish} | fields)


async def follow(ticket: Ticket) -> list[Event]:
    return [event async for event in ticket.events()]


async def collect(tickets: Sequence[Ticket]) -> list[Event]:
    """Return the last event of each ticket."""
    return [events[-1] for events in await asyncio.gather(*map(follow, tickets))]


async def edit(cluster: Cluster, *orders: Order) -> list[Event]:
    """Submit one request, and return the last event of each of its orders."""
    return await collect(cluster.submit(orders))


def edit_alone(order: Order, model: "Model") -> Pixels:
    """Compute an order of a picture that is not registered with the engine, in this process."""
    from instgenie.engine.finish import finish
    from instgenie.engine.loop import Engine
    from instgenie.engine.own import can_reuse_own, reuse_own
    from instgenie.engine.prepare import prepare

    job = prepare(order.wish.edit(order.picture, order.mask, model.steps, model.guidance), model)
    job = reuse_own(job) if can_reuse_own(job) else job
    engine = Engine(model)
    engine.join(job)
    while engine.jobs:
        engine.step()
    return finish(job, model)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.02)


def open_encoded(picture: bytes) -> Pixels:
    return np.array(Image.open(io.BytesIO(picture)))


def pictures(events: Sequence[Event]) -> list[Pixels]:
    assert all(isinstance(event, Finished) for event in events), events
    return [open_encoded(event.picture) for event in events if isinstance(event, Finished)]


def are_equal(pictures: Sequence[Pixels], others: Sequence[Pixels]) -> bool:
    """True if pictures are equal up to rounding, which depends on the other jobs in a batch."""
    apart = [np.abs(a.astype(int) - b) for a, b in zip(pictures, others, strict=True)]
    return all(a.max() <= 1 and (a > 0).mean() < 0.01 for a in apart)


async def register(cluster: Cluster, tenant: str, *orders: Order) -> list[str]:
    ids = [(await cluster.register(tenant, order.picture, order.wish.steps)).id for order in orders]
    await until(lambda: all(status.state == "ready" for status in cluster.templates(tenant)))
    return ids


def submit_all(cluster: Cluster, orders: Sequence[Order]) -> list[Ticket]:
    return [ticket for start in range(0, len(orders), 2) for ticket in cluster.submit(orders[start : start + 2])]


def pid_of(cluster: Cluster, role: str, worker: int = 0) -> int:
    [pid] = [process.pid for process in cluster.status().workers[worker].processes if process.role == role]
    assert pid is not None
    return pid


def kill(cluster: Cluster, role: str, worker: int = 0) -> None:
    os.kill(pid_of(cluster, role, worker), signal.SIGKILL)


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    return Path(f"/proc/{pid}").exists()

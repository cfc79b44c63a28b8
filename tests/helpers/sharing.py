"""A template that one worker registers is used by another: played on two workers, wherever they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from helpers.clusters import TENANT, edit, make_order, pictures, register, until
from helpers.s3 import URL, Server
from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.library import Library
from instgenie.cluster.orders import Finished
from instgenie.cluster.processes import Process


@contextmanager
def s3_store(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a real S3-compatible server, which the environment of the block leads to."""
    server = Server()
    for name, value in server.options.items():
        patch.setenv(f"FSSPEC_S3_{name.upper()}", value)
    try:
        yield URL
    finally:
        server.kill()


def note_registrations(patch: pytest.MonkeyPatch) -> list[int]:
    """The workers that have computed a template since this call, in the order they did."""
    workers: list[int] = []
    on_registered = Library.on_registered

    def note(self: Library, process: Process, message: wire.Registered, frames: list[wire.Frame]) -> None:
        if message.num_registered_steps == message.num_steps:
            workers.append(process.worker)
        on_registered(self, process, message, frames)

    patch.setattr(Library, "on_registered", note)
    return workers


async def edit_one(cluster: Cluster, picture_seed: int) -> Finished:
    [event] = await edit(cluster, make_order(7, picture_seed=picture_seed))
    assert isinstance(event, Finished), event
    return event


def are_same(*events: Finished) -> bool:
    first, *others = pictures(events)
    return all(np.array_equal(first, other) for other in others)


async def register_on_one(cluster: Cluster, picture_seed: int, registered: list[int]) -> tuple[str, int, Finished]:
    """Register a template. Return its id, the worker that holds it, and an edit there."""
    cluster._coordinator.placement.router.policy = "mask_aware"
    [template] = await register(cluster, TENANT, make_order(picture_seed=picture_seed))
    holder = registered[-1]
    first = await edit_one(cluster, picture_seed)
    assert (first.facts.worker, first.facts.cache_tier) == (holder, "host")
    return template, holder, first


async def copy_from_memory(cluster: Cluster, registered: list[int]) -> None:
    """The second worker copies a template from the memory of the first."""
    template, holder, first = await register_on_one(cluster, 90, registered)
    cluster._coordinator.placement.router.policy = "round_robin"
    others = [await edit_one(cluster, 90) for _ in range(4)]
    found = [(one.facts.worker == holder, one.facts.cache_tier) for one in others]
    assert sorted(found, key=str) == [(False, "host"), (False, "peer"), (True, "host"), (True, "host")]
    assert are_same(first, *others)
    await until(lambda: len(cluster._coordinator.library.holders(template)) == 2)
    assert registered == [holder]


async def hold_in_store(cluster: Cluster, registered: list[int]) -> tuple[int, Finished]:
    """Have a template in the memory of one worker and in the object store. Return the worker, and an edit there."""
    template, holder, first = await register_on_one(cluster, 91, registered)
    await until(lambda: "remote" in cluster._coordinator.library.templates[template].shared)
    return holder, first


async def copy_from_store(cluster: Cluster, holder: int, first: Finished) -> None:
    """Now that the holder is dead, the other worker loads the template from the object store."""
    again, copied = await edit_one(cluster, 91), await edit_one(cluster, 90)
    assert (again.facts.worker, again.facts.cache_tier) == (1 - holder, "remote")
    assert (copied.facts.worker, copied.facts.cache_tier) == (1 - holder, "host")
    assert are_same(first, again)

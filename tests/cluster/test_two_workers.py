"""Two real workers without a disk: a template that one of them registers is used by both, and both make the same
picture."""

from pathlib import Path

import numpy as np
import pytest
from helpers.clusters import TENANT, Run, edit, kill, make_config, make_order, pictures, register, until

from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.library import Library
from instgenie.cluster.orders import Finished


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The workers that have computed a template, in the order they did."""
    workers: list[int] = []
    on_registered = Library.on_registered

    def note(self: Library, process: object, message: wire.Registered, frames: list[wire.Frame]) -> None:
        if message.num_registered_steps == message.num_steps:
            workers.append(process.worker)  # type: ignore[attr-defined]
        on_registered(self, process, message, frames)  # type: ignore[arg-type]

    monkeypatch.setattr(Library, "on_registered", note)
    return workers


def test_a_worker_copies_a_template_from_the_memory_of_the_one_that_registered_it(
    run: Run, folders: dict[str, Path], environment: None, registered: list[int]
) -> None:
    async def play() -> None:
        two = {"devices": ("cpu", "cpu"), "policy": "round_robin", "batching": "static"}
        cluster = Cluster(make_config(folders["sd"], **two))
        await cluster.start()
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        order = make_order(7, picture_seed=90)
        await register(cluster, TENANT, order)
        events = [event for _ in range(4) for event in await edit(cluster, make_order(7, picture_seed=90))]
        found = [event.facts for event in events if isinstance(event, Finished)]
        [holder] = registered
        tiers = {(one.worker == holder, one.cache_tier) for one in found[:2]}
        assert tiers == {(True, "host"), (False, "peer")}
        assert [(one.cache_tier, one.why_dense) for one in found[2:]] == [("host", "")] * 2
        assert all(np.array_equal(one, pictures(events)[0]) for one in pictures(events))
        assert cluster.status().cache_hits == {"host": 3, "peer": 1}
        await until(lambda: len(cluster._coordinator.library.holders(cluster.templates(TENANT)[0].id)) == 2)
        kill(cluster, "denoise", holder)  # the copy outlives the worker that registered the template
        await until(lambda: not cluster.workers[holder].is_ready)
        [again] = await edit(cluster, make_order(7, picture_seed=90))
        assert isinstance(again, Finished)
        assert (again.facts.worker, again.facts.cache_tier) == (1 - holder, "host")
        assert np.array_equal(*pictures([again, events[0]]))
        assert registered == [holder]
        [status] = cluster.templates(TENANT)
        assert status.state == "ready"
        assert await cluster.stop(60)

    run(play())

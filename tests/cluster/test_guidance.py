"""A worker and its companion, two real processes: edits equal those that run in one, also when the companion dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers.clusters import Run, are_equal, collect, edit_alone, make_config, make_order, pictures, until

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Event, Finished, GuidanceFacts, Order

if TYPE_CHECKING:
    from instgenie.models.model import Model


@pytest.fixture(scope="module", params=["sd", "sd3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(run: Run, folders: dict[str, Path], family: str) -> Iterator[Cluster]:
    cluster = Cluster(make_config(folders[family], devices=("cpu",), guidance_devices=("cpu",)))
    run(cluster.start())
    run(until(lambda: all(worker.is_ready for worker in cluster.workers) and companion(cluster).state == "ready"))
    yield cluster
    run(cluster.stop(0))


def companion(cluster: Cluster) -> Any:
    [service] = cluster.status().services
    return service


def some_orders(steps: int) -> list[Order]:
    """Edits with two branches, with one, and one that computes every token."""
    fields: list[dict[str, Any]] = [
        {"guidance": 3.0, "true_guidance": 3.0},
        {"guidance": 1.0},
        {"guidance": 2.0, "reuse": "off"},
    ]
    return [make_order(seed=seed, picture_seed=seed, steps=steps, **own) for seed, own in enumerate(fields)]


async def edit_all(cluster: Cluster, orders: list[Order]) -> list[Event]:
    return await collect([ticket for order in orders for ticket in cluster.submit([order])])


def test_law_two_processes_are_one(run: Run, cluster: Cluster, models: "dict[str, Model]", family: str) -> None:
    orders = some_orders(steps=6)
    events = run(edit_all(cluster, orders))
    assert [event.facts.guidance for event in events] == [GuidanceFacts(), None, GuidanceFacts()]
    assert are_equal(pictures(events), [edit_alone(order, models[family]) for order in orders])


def test_a_companion_that_dies_costs_a_step_and_not_the_edit(
    run: Run, cluster: Cluster, models: "dict[str, Model]", family: str
) -> None:
    orders = some_orders(steps=24)

    async def kill_twice() -> list[Event]:
        tickets = [ticket for order in orders for ticket in cluster.submit([order])]
        for num_killed, step in enumerate((3, 12)):
            await until(lambda step=step: max_step(cluster) >= step)
            await until_restarted(cluster, num_killed)
            os.kill(companion(cluster).pid, signal.SIGKILL)
        events = await collect(tickets)
        await until_restarted(cluster, 2)
        return events

    before = [process.num_starts for worker in cluster.status().workers for process in worker.processes]
    events = run(kill_twice())
    assert are_equal(pictures(events), [edit_alone(order, models[family]) for order in orders])
    after = [process.num_starts for worker in cluster.status().workers for process in worker.processes]
    assert before == after  # the worker did not have to start again
    facts = [event.facts.guidance for event in events if isinstance(event, Finished)]
    assert facts[1] is None
    assert facts[0] is not None  # it has begun with a companion; the last edit may have joined while there was none
    assert not any(one.is_alone for one in facts if one)
    assert sum(one.num_repeats for one in facts if one) >= 1
    assert all(event.facts.num_attempts == 1 for event in events if isinstance(event, Finished))


async def until_restarted(cluster: Cluster, times: int) -> None:
    await until(lambda: companion(cluster).state == "ready" and companion(cluster).num_restarts == times)


def max_step(cluster: Cluster) -> int:
    return max((job.step for worker in cluster.status().workers for job in worker.running), default=0)

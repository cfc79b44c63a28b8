"""Two workers that share two processes of ControlNets: edits equal those that run alone, also while processes die."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.clusters import Run, are_equal, collect, edit, make_config, make_order, open_encoded, pictures, until

from instgenie.adapters.controlnets import ControlNetRegistry
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ControlConfig
from instgenie.cluster.orders import Event, Failed, Finished, Order
from instgenie.types import ControlUse, Pixels

if TYPE_CHECKING:
    from instgenie.models.model import Model


@pytest.fixture(scope="module")
def modules(models: "dict[str, Model]", tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from helpers.controlnets import save_controlnet

    folder = tmp_path_factory.mktemp("controlnets")
    made = {
        name: str(save_controlnet(folder / name, models["sd"], seed)) for seed, name in enumerate(["edges", "pose"])
    }
    broken = save_controlnet(folder / "broken", models["sd"], 3)
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    return made | {"broken": str(broken)}


@pytest.fixture(scope="module")
def cluster(run: Run, folders: dict[str, Path], modules: dict[str, str]) -> Iterator[Cluster]:
    controls = ControlConfig(tuple(modules.items()), devices=("cpu", "cpu"))
    cluster = Cluster(make_config(folders["sd"], devices=("cpu", "cpu"), controls=controls))
    run(cluster.start())
    run(until(lambda: all(worker.is_ready for worker in cluster.workers)))
    yield cluster
    run(cluster.stop(0))


def controlled(modules: dict[str, str], *uses: ControlUse, seed: int = 0, **fields: Any) -> Order:
    order = make_order(seed=seed, picture_seed=seed, **fields)
    images = [np.random.default_rng(50 + seed).integers(0, 256, order.picture.shape, dtype=np.uint8) for _ in uses]
    wish = replace(order.wish, controls=ControlNetRegistry(modules).resolve(uses))
    return replace(order, wish=wish, control_images=tuple(images))


def edit_alone(order: Order, model: "Model") -> Pixels:
    from helpers.edits import run

    from instgenie.engine.finish import finish
    from instgenie.engine.own import can_reuse_own, reuse_own
    from instgenie.engine.prepare import prepare

    asked = order.wish.edit(order.picture, order.mask, model.steps, model.guidance, order.control_images)
    job = prepare(asked, model)
    job = reuse_own(job) if can_reuse_own(job) else job
    [latents] = run(model, [job])
    return finish(replace(job, latents=latents), model)


def some_orders(modules: dict[str, str], steps: int = 4) -> list[Order]:
    """Edits with one ControlNet, with two in two processes, for some of the steps, and with none."""
    edges, pose = ControlUse("edges", 0.8), ControlUse("pose", 0.5, end=0.5)
    uses = [[edges], [edges, pose], [pose], []]
    return [controlled(modules, *own, seed=seed, steps=steps, guidance=2.0) for seed, own in enumerate(uses)]


async def edit_each(cluster: Cluster, orders: Sequence[Order]) -> list[Event]:
    """Submit each order as a request of its own."""
    return await collect([ticket for order in orders for ticket in cluster.submit([order])])


def test_edits_through_processes_are_those_in_one(
    run: Run, cluster: Cluster, modules: dict[str, str], models: "dict[str, Model]"
) -> None:
    orders = some_orders(modules)
    found = pictures(run(edit_each(cluster, orders)))
    assert are_equal(found, [edit_alone(order, models["sd"]) for order in orders])
    plain = [edit_alone(replace(order, wish=replace(order.wish, controls=()), control_images=()), models["sd"])
             for order in orders[:3]]  # fmt: skip
    assert not any(are_equal([one], [other]) for one, other in zip(found, plain, strict=False))
    kept = [service.controlnets for service in cluster.status().services]
    assert [one and (one.num_kept, one.num_loads) for one in kept] == [(1, 1), (1, 1)]  # one each, for both workers
    assert {service.state for service in cluster.status().services} == {"ready"}


def test_a_process_that_dies_costs_a_step_and_not_the_edit(
    run: Run, cluster: Cluster, modules: dict[str, str], models: "dict[str, Model]"
) -> None:
    orders = some_orders(modules, steps=16)

    async def kill_often() -> list[Any]:
        tickets = [ticket for order in orders for ticket in cluster.submit([order])]
        for number, step in ((0, 1), (1, 5)):
            await until(lambda step=step: steps_taken(cluster) >= 2 * step)
            pids = [service.pid for service in cluster.status().services]
            if pids[number] is not None:
                os.kill(pids[number], signal.SIGKILL)
        return await collect(tickets)

    before = [process.num_starts for worker in cluster.status().workers for process in worker.processes]
    events = run(kill_often())
    assert are_equal(pictures(events), [edit_alone(order, models["sd"]) for order in orders])
    after = [process.num_starts for worker in cluster.status().workers for process in worker.processes]
    assert before == after  # no worker had to start again
    assert sum(service.num_restarts for service in cluster.status().services) == 2
    retries = [event.facts.num_control_retries for event in events if isinstance(event, Finished)]
    assert sum(retries) >= 1
    assert retries[3] == 0  # it has no ControlNet
    assert all(event.facts.num_attempts == 1 for event in events if isinstance(event, Finished))


def steps_taken(cluster: Cluster) -> int:
    return sum(job.step for worker in cluster.status().workers for job in worker.running)


def test_a_broken_controlnet_fails_its_edit_alone(run: Run, cluster: Cluster, modules: dict[str, str]) -> None:
    bad, good = controlled(modules, ControlUse("broken")), controlled(modules, ControlUse("edges"), seed=1)
    failed, finished = run(edit_each(cluster, [bad, good]))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.param) == ("bad_input", "controls")
    assert "the ControlNet 'broken' cannot be loaded" in failed.message
    assert isinstance(finished, Finished)
    assert open_encoded(finished.picture).shape == good.picture.shape
    [event] = run(edit(cluster, make_order()))
    assert isinstance(event, Finished)

"""The cluster with real processes and real sockets, on tiny models."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import (
    TENANT,
    Run,
    are_equal,
    collect,
    edit,
    follow,
    kill,
    make_config,
    make_order,
    open_encoded,
    pictures,
    register,
    submit_all,
    until,
)
from PIL import Image

from instgenie.cluster.config import CacheConfig
from instgenie.cluster.entries import Ticket
from instgenie.cluster.local import Cluster
from instgenie.cluster.orders import Event, Failed, Finished, Order, Partial, Queued, Stepped
from instgenie.cluster.status import Observer
from instgenie.editor import Editor
from instgenie.engine.finish import finish
from instgenie.engine.loop import Engine
from instgenie.engine.prepare import prepare
from instgenie.errors import ClosedError, MaskError
from instgenie.models.model import Model
from instgenie.scheduling.names import Batching
from instgenie.types import Pixels


class Recorder(Observer):
    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def step(self, worker: int, seconds: float, batch_size: int) -> None:
        self.batch_sizes.append(batch_size)


@pytest.fixture(scope="module")
def cluster(run: Run, folders: dict[str, Path], environment: None) -> Iterator[Cluster]:
    cluster = Cluster(make_config(folders["sd"]))
    run(cluster.start())
    run(cluster.until_ready())
    yield cluster
    run(cluster.stop(0))


def edit_alone(order: Order, model: Model) -> Pixels:
    """By the engine in this process."""
    edit = order.wish.edit(order.picture, order.mask, model.steps, model.guidance)
    job = prepare(edit, model)
    engine = Engine(model)
    engine.join(job)
    while engine.jobs:
        engine.step()
    return finish(job, model)


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, instgenie.cluster.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_order_becomes_the_engines_picture(run: Run, cluster: Cluster, models: dict[str, Model]) -> None:
    order = make_order(seed=3, num_partials=2)

    async def play() -> list[Event]:
        return await follow(cluster.submit([order])[0])

    events = run(play())
    assert isinstance(events[0], Queued)
    assert [event for event in events if isinstance(event, Stepped)] == [Stepped(step, 4) for step in (1, 2, 3, 4)]
    partials = [event for event in events if isinstance(event, Partial)]
    assert [partial.index for partial in partials] == [0, 1]
    [edited] = pictures(events[-1:])
    expected = edit_alone(order, models["sd"])
    assert are_equal([edited], [expected])
    assert (edited[~order.mask] == order.picture[~order.mask]).all()
    errors = [np.abs(open_encoded(p.picture).astype(int) - expected)[order.mask].mean() for p in partials]
    assert max(errors) > 0
    facts = events[-1].facts
    assert (facts.seed, facts.width, facts.height, facts.num_attempts, facts.cache_tier) == (3, 48, 40, 1, None)
    assert min(facts.prepare_seconds, facts.denoise_seconds, facts.finish_seconds) > 0


def test_formats(run: Run, cluster: Cluster) -> None:
    orders = [
        make_order(output_format=name, output_compression=q) for name, q in (("png", 0), ("jpeg", 50), ("webp", 100))
    ]
    events = run(edit(cluster, *orders))
    opened = [Image.open(io.BytesIO(event.picture)) for event in events]
    assert [image.format for image in opened] == ["PNG", "JPEG", "WEBP"]
    assert (np.array(opened[0]) == np.array(opened[2])).all()


def test_a_short_job_that_comes_later_ends_first(run: Run, cluster: Cluster) -> None:
    async def submit() -> list[str]:
        ended: list[str] = []

        async def note(name: str, ticket: Ticket) -> None:
            await follow(ticket)
            ended.append(name)

        [long] = cluster.submit([make_order(steps=60)])
        noting = asyncio.create_task(note("long", long))
        await until(lambda: any(job.step > 1 for job in cluster.status().workers[0].running))
        await asyncio.gather(noting, note("short", cluster.submit([make_order(steps=2)])[0]))
        return ended

    assert run(submit()) == ["short", "long"]


def test_orders_of_a_request_share_their_batch(run: Run, cluster: Cluster) -> None:
    recorder = Recorder()
    cluster.observe(recorder)
    run(edit(cluster, *(make_order(seed, steps=3) for seed in range(3))))
    assert recorder.batch_sizes == [3, 3, 3]


def test_a_cancelled_job_leaves_and_the_others_stay(run: Run, cluster: Cluster) -> None:
    async def cancel() -> None:
        [long], [other] = cluster.submit([make_order(steps=900)]), cluster.submit([make_order(steps=30)])
        running = cluster.status().workers[0]
        assert running.num_waiting == 2
        async for event in long.events():
            if isinstance(event, Stepped):
                long.cancel()
        [last] = await collect([other])
        assert isinstance(last, Finished)
        assert cluster.status().num_running == 0

    run(cancel())


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("poison of prepare", "internal"),
        ("poison of steps", "internal"),
        ("poison of finish", "internal"),
        ("too large", "out_of_memory"),
    ],
)
def test_a_poisoned_job_fails_alone(run: Run, cluster: Cluster, prompt: str, kind: str) -> None:
    pids = [process.pid for process in cluster.status().workers[0].processes]
    poisoned, *others = run(edit(cluster, make_order(prompt=prompt), make_order(1), make_order(2)))
    assert isinstance(poisoned, Failed)
    assert poisoned.kind == kind
    pictures(others)
    assert pids == [process.pid for process in cluster.status().workers[0].processes]


def test_a_batch_that_does_not_fit_is_halved(run: Run, cluster: Cluster) -> None:
    recorder = Recorder()
    cluster.observe(recorder)
    pictures(run(edit(cluster, *(make_order(seed, prompt="large", steps=3) for seed in range(4)))))
    assert recorder.batch_sizes[0] == 4
    assert recorder.batch_sizes[1:] == [1] * len(recorder.batch_sizes[1:])


def test_what_is_wrong_with_an_order_is_said_at_once(run: Run, cluster: Cluster) -> None:
    order = make_order()
    with pytest.raises(MaskError, match="empty"):
        cluster.submit([make_order(mask=np.zeros_like(order.mask))])


def test_templates(run: Run, cluster: Cluster, folders: dict[str, Path]) -> None:
    order = make_order(7, picture_seed=50)

    async def edit_of(tenant: str) -> Finished:
        [event] = await edit(cluster, make_order(7, picture_seed=50, tenant=tenant))
        assert isinstance(event, Finished)
        return event

    async def play() -> None:
        [template] = await register(cluster, "one", order)
        [status] = cluster.templates("one")
        assert (status.num_steps, status.num_registered_steps, status.width, status.height) == (4, 4, 48, 40)
        assert status.tier_bytes["host"] > 0
        assert cluster.template("two", template) is None
        assert not await cluster.forget("two", template)
        hit, miss = await edit_of("one"), await edit_of("two")
        assert (hit.facts.cache_tier, miss.facts.cache_tier) == ("host", None)
        assert hit.facts.num_computed_tokens < miss.facts.num_computed_tokens
        editor = Editor(str(folders["sd"]), "cpu")
        editor.register(order.picture, steps=4)
        expected = editor.edit(order.picture, order.mask, order.wish.prompt, seed=7, steps=4)
        assert expected.cache_hit
        assert are_equal(pictures([hit]), [expected.picture])
        await until(lambda: cluster.templates("two") and cluster.templates("two")[0].state == "ready")  # unasked
        assert (await edit_of("two")).facts.cache_tier == "host"
        assert await cluster.forget("one", template)
        assert (await edit_of("one")).facts.cache_tier is None

    run(play())


def mixed(tenant: str) -> list[Order]:
    return [
        make_order(
            seed=index,
            picture_seed=60 + index % 5,
            tenant=tenant,
            share=0.1 + 0.08 * (index % 10),
            steps=(4, 4, 7)[index % 3],
            guidance=(1.0, 7.5)[index % 2],
            strength=(1.0, 1.0, 1.0, 0.6)[index % 4],
            feather=index % 3,
            prompt=("a red cat", "a blue dog on grass")[index % 2],
        )
        for index in range(30)
    ]


def test_killed_processes_cost_no_edit(run: Run, cluster: Cluster) -> None:
    """Each role dies once on the way; cached and dense edits alike come out as in the undisturbed run."""

    async def play(tenant: str, roles: Sequence[str]) -> list[Event]:
        orders = mixed(tenant)
        await register(cluster, tenant, orders[0], orders[1])
        tickets = submit_all(cluster, orders)
        collecting = asyncio.create_task(collect(tickets))
        num_before = cluster.status().num_finished
        moments = {
            "prepare": lambda: True,
            "denoise": lambda: cluster.status().workers[0].running,
            "finish": lambda: cluster.status().num_finished > num_before,
        }
        for role in roles:
            await until(moments[role])
            kill(cluster, role)
        events = await collecting
        await until(lambda: cluster.ready)
        return events

    undisturbed = run(play("undisturbed", []))
    num_restarts = cluster.status().num_restarts
    disturbed = run(play("disturbed", ["prepare", "denoise", "finish"]))
    assert cluster.status().num_restarts == num_restarts + 3
    assert are_equal(pictures(disturbed), pictures(undisturbed))
    tiers = [[event.facts.cache_tier for event in events] for events in (undisturbed, disturbed)]
    assert tiers[0] == tiers[1]
    assert set(tiers[0]) == {None, "host"}
    assert max(event.facts.num_attempts for event in disturbed) > 1


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("batching", "first_picture"), [("naive", 80), ("static", 200)])
def test_workers_of_one_process_and_the_drain(
    batching: Batching, first_picture: int, run: Run, cluster: Cluster, folders: dict[str, Path]
) -> None:
    """Same pictures; naive steps are interrupted; a cluster that is stopped finishes what it has accepted."""
    orders = [make_order(seed, picture_seed=first_picture + seed, steps=(30, 3, 3, 3, 3)[seed]) for seed in range(5)]

    async def play() -> None:
        num_before = cluster.status().workers[0].num_interruptions
        expected = pictures(await collect(submit_all(cluster, orders)))
        other, recorder = Cluster(make_config(folders["sd"], batching=batching)), Recorder()
        other.observe(recorder)
        await other.start()
        await other.until_ready()
        tickets = submit_all(other, orders)
        await until(lambda: recorder.batch_sizes)
        processes = other.status().workers[0].processes
        stopping = asyncio.create_task(other.stop(300))
        found = await collect(tickets)
        assert are_equal(pictures(found), expected)
        assert (other.status().workers[0].num_interruptions > 0) == (batching == "naive")
        assert cluster.status().workers[0].num_interruptions == num_before
        assert await stopping
        with pytest.raises(ClosedError):
            other.submit([make_order()])
        assert not other.ready
        assert not any(is_alive(process.pid) for process in processes)

    run(play())


async def open_cluster(folder: Path, cache: CacheConfig, **fields: Any) -> Cluster:
    cluster = Cluster(make_config(folder, cache=cache, **fields))
    await cluster.start()
    await until(lambda: all(worker.is_ready for worker in cluster.workers))
    return cluster


async def edit_one(cluster: Cluster, **fields: Any) -> Finished:
    [event] = await edit(cluster, make_order(7, picture_seed=90, steps=8, **fields))
    assert isinstance(event, Finished), event
    return event


def spans(cache: CacheConfig) -> list[Path]:
    assert cache.disk
    return sorted(Path(cache.disk).glob("*/0*.safetensors"))


def test_templates_outlive_workers_and_clusters(
    run: Run, folders: dict[str, Path], environment: None, tmp_path: Path
) -> None:
    cache = CacheConfig(disk=str(tmp_path / "disk"))
    order = make_order(picture_seed=90, steps=8)

    async def leave_behind() -> Finished:
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        await register(cluster, TENANT, order)
        await until(lambda: len(spans(cache)) == 2)  # of four steps each: all of them are written
        finished = await edit_one(cluster)
        assert await cluster.stop(60)
        return finished

    async def find(expected: Finished) -> None:
        two = {"devices": ("cpu", "cpu"), "policy": "round_robin", "batching": "static"}
        cluster = await open_cluster(folders["sd"], cache, **two)
        others = [await edit_one(cluster, tenant="another"), await edit_one(cluster, quality="exact")]
        assert [other.facts.cache_tier for other in others] == [None, None]
        found = [await edit_one(cluster) for _ in range(4)]
        assert sorted(event.facts.cache_tier or "" for event in found) == ["disk", "disk", "host", "host"]
        assert {event.facts.worker for event in found} == {0, 1}
        assert are_equal(pictures(found), pictures([expected] * 4))
        [status] = cluster.templates(TENANT)
        assert status.state == "ready"
        await until(lambda: cluster.templates(TENANT)[0].tier_bytes.keys() == {"host", "disk"})
        assert cluster.status().cache_hits == {"disk": 2, "host": 2}
        assert all(worker.num_interruptions == 0 for worker in cluster.status().workers)
        await lose_all_but_the_disk(cluster, expected, status.id)
        assert await cluster.stop(60)

    async def lose_all_but_the_disk(cluster: Cluster, expected: Finished, template: str) -> None:
        for worker in cluster.status().workers:
            assert worker.pid
            os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not any(worker.is_ready for worker in cluster.workers))
        await until(lambda: all(worker.is_ready for worker in cluster.workers))
        again = await edit_one(cluster)
        assert again.facts.cache_tier == "disk"
        assert are_equal(pictures([again]), pictures([expected]))
        assert await cluster.forget(TENANT, template)
        await until(lambda: not any(path.exists() for path in mine))
        assert (await edit_one(cluster)).facts.cache_tier is None

    expected = run(leave_behind())
    assert expected.facts.cache_tier == "host"
    assert {path.stat().st_mode & 0o777 for path in spans(cache)} == {0o600}
    mine = spans(cache)
    assert len(mine) == 2
    run(find(expected))


def test_what_is_damaged_on_disk_is_a_miss(
    run: Run, folders: dict[str, Path], environment: None, tmp_path: Path
) -> None:
    """The cluster says that it is there, and so it is registered again before it is used: what is damaged, no more."""
    cache = CacheConfig(disk=str(tmp_path / "disk"))
    order = make_order(picture_seed=90, steps=8)

    async def play() -> None:
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        dense = await edit_one(cluster)
        await until(lambda: [status.tier_bytes.get("disk") for status in cluster.templates(TENANT)])
        await until(lambda: len(spans(cache)) == 2)
        cached = await edit_one(cluster)
        await cluster.stop(60)
        damage(spans(cache)[1])
        cluster = await open_cluster(folders["sd"], cache, batching="static")
        await until(lambda: cluster.templates(TENANT))  # what is there is listed by its headers
        first = await edit_one(cluster)
        assert (dense.facts.cache_tier, cached.facts.cache_tier) == (None, "host")
        assert first.facts.cache_tier is not None
        assert are_equal(pictures([first]), pictures([cached]))
        await until(lambda: "disk" in cluster.templates(TENANT)[0].tier_bytes)
        await register(cluster, TENANT, order)
        damage(spans(cache)[0])
        kill(cluster, "denoise")
        await until(lambda: not cluster.ready)
        again = await edit_one(cluster)
        assert again.facts.cache_tier is not None
        assert are_equal(pictures([again]), pictures([cached]))
        await cluster.stop(60)

    run(play())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 255
    path.write_bytes(data)


def test_workers_do_not_outlive_a_parent_that_is_killed(folders: dict[str, Path], environment: None) -> None:
    code = f"""
        import asyncio
        from instgenie.cluster.local import Cluster
        from instgenie.cluster.config import ClusterConfig

        async def main():
            cluster = Cluster(ClusterConfig(model={str(folders["sd"])!r}, devices=("cpu",), batching="naive"))
            await cluster.start()
            await cluster.until_ready()
            print(cluster.status().workers[0].pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    asyncio.run(until(lambda: not is_alive(pid)))


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    async def play() -> None:
        cluster = Cluster(make_config(tmp_path, batching="naive"))
        await cluster.start()
        [ticket] = cluster.submit([make_order()])
        [failed] = await collect([ticket])
        assert isinstance(failed, Failed)
        assert "model_index.json" in failed.message
        assert not cluster.healthy
        with pytest.raises(ClosedError, match=r"model_index\.json"):
            await cluster.until_ready()
        await cluster.stop(1)

    run(play())

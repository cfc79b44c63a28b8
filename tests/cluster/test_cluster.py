"""A cluster of real processes and real sockets, on tiny models."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.clusters import (
    Run,
    are_equal,
    collect,
    edit,
    edit_alone,
    follow,
    is_alive,
    kill,
    make_config,
    make_order,
    open_encoded,
    pictures,
    pid_of,
    register,
    submit_all,
    until,
)
from PIL import Image

from instgenie.cluster import wire
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Event, Failed, Finished, Order, Partial, Queued, Stepped
from instgenie.cluster.processes import Process
from instgenie.cluster.status import Observer
from instgenie.editor import Editor
from instgenie.errors import ClosedError, MaskError
from instgenie.models.model import Model
from instgenie.scheduling.names import Batching


class Recorder(Observer):
    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def step(self, worker: int, seconds: float, batch_size: int, between: float) -> None:
        self.batch_sizes.append(batch_size)


@pytest.fixture(scope="module")
def cluster(run: Run, folders: dict[str, Path], environment: None) -> Iterator[Cluster]:
    cluster = Cluster(make_config(folders["sd"]))
    run(cluster.start())
    run(cluster.until_ready())
    yield cluster
    run(cluster.stop(0))


def test_a_cluster_imports_no_torch() -> None:
    code = "import sys, instgenie.cluster.cluster; sys.exit('torch' in sys.modules)"
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


def test_no_cancelled_edit_is_prepared(run: Run, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[wire.AnyMessage] = []
    handle = cluster._coordinator.handle

    def note(process: Process, message: wire.AnyMessage, frames: list[wire.Frame]) -> None:
        answers.append(message)
        handle(process, message, frames)

    async def cancel() -> set[str]:
        monkeypatch.setattr(cluster._coordinator, "handle", note)
        tickets = [cluster.submit([make_order(seed, quality="exact")])[0] for seed in range(50)]
        for ticket in tickets:
            ticket.cancel()
        [last] = await collect(cluster.submit([make_order(steps=2, quality="exact")]))
        assert isinstance(last, Finished)
        await until(lambda: not any(process.leaving for process in cluster.workers[0].processes.values()))
        return {ticket.id for ticket in tickets}

    cancelled = run(cancel())
    # one may have begun before it was cancelled, and one may have been at hand
    assert sum(isinstance(answer, wire.Prepared) and answer.id in cancelled for answer in answers) <= 2
    assert sum(isinstance(answer, wire.Dropped) and answer.id in cancelled for answer in answers) <= 2


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


def test_an_invalid_order_is_refused_at_once(run: Run, cluster: Cluster) -> None:
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
        await until(lambda: [status.state for status in cluster.templates("two")] == ["ready"])  # registered unasked
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
    """Each role is killed once, and then all at once, with their nursery; cached and dense edits come out as in the
    undisturbed run."""

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
            "nursery": lambda: cluster.status().workers[0].running,
        }
        for role in roles:
            await until(moments[role])
            if role == "nursery":
                os.kill(psutil.Process(pid_of(cluster, "denoise")).ppid(), signal.SIGKILL)
            else:
                kill(cluster, role)
        events = await collecting
        await until(lambda: cluster.ready)
        return events

    undisturbed = run(play("undisturbed", []))
    num_restarts = cluster.status().num_restarts
    disturbed = run(play("disturbed", ["prepare", "denoise", "finish"]))
    assert cluster.status().num_restarts == num_restarts + 3
    without_nursery = run(play("without nursery", ["nursery"]))
    assert cluster.status().num_restarts == num_restarts + 6
    assert are_equal(pictures(disturbed), pictures(undisturbed))
    assert are_equal(pictures(without_nursery), pictures(undisturbed))
    tiers = [[event.facts.cache_tier for event in events] for events in (undisturbed, disturbed, without_nursery)]
    assert tiers[0] == tiers[1] == tiers[2]
    assert set(tiers[0]) == {None, "host"}
    for events in (disturbed, without_nursery):
        assert max(event.facts.num_attempts for event in events) > 1


@pytest.mark.parametrize(("batching", "first_picture"), [("naive", 80), ("static", 200)])
def test_workers_of_one_process_and_the_drain(
    batching: Batching, first_picture: int, run: Run, cluster: Cluster, folders: dict[str, Path]
) -> None:
    """The pictures are the same, naive steps are interrupted, and a stopped cluster finishes the edits it accepted."""
    steps = (30, 3, 3, 3, 3)
    orders = [  # without reuse, because a registration interrupts steps too
        make_order(seed, picture_seed=first_picture + seed, steps=steps[seed], reuse="off") for seed in range(5)
    ]

    async def play() -> None:
        await until(lambda: not cluster.workers[0].has_work)  # registrations of other tests' pictures
        await edit(cluster, make_order(steps=1, reuse="off"))  # a step tells of the interruptions before it
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

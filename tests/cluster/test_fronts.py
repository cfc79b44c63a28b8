"""Two fronts that share one worker: real processes, each with a connection to both fronts."""

import asyncio
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.clusters import QUIRK, Run, are_equal, edit, make_config, make_order, pictures, register, until
from helpers.fronts import Nodes, SharedLauncher

from instgenie.cluster.cluster import Cluster
from instgenie.cluster.orders import Finished
from instgenie.pictures.digest import picture_digest
from instgenie.scheduling.backlog import NO_LOAD

COUNTING = """
    import os
    from instgenie.engine import loop

    join = loop.Engine.join

    def counted(self, job):
        with open(os.environ["TEST_JOINS"], "a") as file:
            file.write(f"{job.edit.prompt} {job.edit.seed}\\n")
        join(self, job)

    loop.Engine.join = counted
"""


@pytest.fixture(scope="module")
def joins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file with one line for each job that began to take steps."""
    folder = tmp_path_factory.mktemp("joins")
    (folder / "counting.py").write_text(textwrap.dedent(COUNTING))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(QUIRK, str(folder / "counting.py"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TEST_JOINS", str(folder / "joins"))
        yield folder / "joins"


@pytest.fixture(scope="module")
def nodes(run: Run, joins: Path) -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    run(nodes.close())


@pytest.fixture(scope="module")
def fronts(run: Run, folders: dict[str, Path], nodes: Nodes) -> Iterator[list[Cluster]]:
    fronts = [Cluster(make_config(folders["sd"], register_after=2), SharedLauncher(nodes, name)) for name in ("a", "b")]
    for front in fronts:
        run(front.start())
    run(until(lambda: all(front.ready for front in fronts)))
    yield fronts
    for front in fronts:
        run(front.stop(0))


def test_both_fronts_use_one_set_of_processes(run: Run, fronts: list[Cluster], nodes: Nodes) -> None:
    async def play() -> list[list[Finished]]:
        orders = [make_order(seed=1), make_order(seed=2)]
        return await asyncio.gather(*(edit(front, order) for front, order in zip(fronts, orders, strict=True)))

    [[one], [other]] = run(play())
    assert isinstance(one, Finished)
    assert isinstance(other, Finished)
    assert len(nodes.children) == 3
    pids = [[process.pid for process in front.status().workers[0].processes] for front in fronts]
    assert pids[0] == pids[1]


def test_a_router_sees_what_the_other_front_has_given_to_a_worker(run: Run, fronts: list[Cluster]) -> None:
    one, other = fronts

    async def play() -> None:
        await until(lambda: all(front.workers[0].load.foreign == NO_LOAD for front in fronts))  # of the tests before
        collecting = asyncio.create_task(edit(one, *(make_order(seed, steps=40) for seed in range(3))))
        load = other.workers[0].load
        await until(lambda: load.foreign.num_edits == 3 and load.foreign.num_steps < 120)
        assert load.num_edits == 3
        assert load.seconds > 0
        assert load.own == NO_LOAD
        assert one.workers[0].load.foreign == NO_LOAD  # nothing comes back to the front that it came from
        assert other.status().workers[0].predicted_seconds > 0
        pictures(await collecting)
        await until(lambda: load.foreign == NO_LOAD)
        assert load.num_steps == load.num_edits == 0

    run(play())
    assert one.workers[0].num_fronts == 2


def test_a_template_of_one_front_is_used_and_deleted_by_the_other(run: Run, fronts: list[Cluster]) -> None:
    one, other = fronts
    order = make_order(picture_seed=7)

    async def play() -> Finished:
        [name] = await register(one, order.tenant, order)
        await until(lambda: (status := other.template(order.tenant, name)) and "host" in status.tier_bytes)
        [event] = await edit(other, order)
        assert isinstance(event, Finished)
        assert await other.forget(order.tenant, name)
        await until(lambda: one.template(order.tenant, name) is None)
        return event

    assert run(play()).facts.cache_tier == "host"


def test_a_picture_that_comes_back_to_another_front_is_registered(run: Run, fronts: list[Cluster]) -> None:
    """Neither front sees two edits of it; the worker counts for both."""
    digest = picture_digest(make_order(picture_seed=8).picture)

    async def play() -> list[Finished]:
        events = []
        for number, front in enumerate((*fronts, fronts[0])):
            [event] = await edit(front, make_order(picture_seed=8, request_id=f"request {number}"))
            assert isinstance(event, Finished)
            events.append(event)
            if number == 1:
                await until(lambda: all(is_held(front) for front in fronts))
        return events

    def is_held(front: Cluster) -> bool:
        return any(
            record.holders and record.order.digest == digest for record in front._coordinator.library.templates.values()
        )

    assert [event.facts.cache_tier for event in run(play())] == [None, None, "host"]


def test_an_urgent_edit_of_one_front_overtakes_those_of_the_other(run: Run, fronts: list[Cluster]) -> None:
    """A batch has room for four, and all are of the first front. Each front hears of its own edits alone."""
    one, other = fronts

    async def play() -> None:
        orders = [make_order(seed, steps=40, reuse="own") for seed in range(4)]
        quiet = await edit(one, *orders)
        following = asyncio.create_task(edit(one, *orders))
        await until(lambda: sum(job.step > 0 for job in one.status().workers[0].running) == 4)
        [event] = await edit(other, replace(make_order(9, steps=2, reuse="own"), priority=-1))
        assert isinstance(event, Finished)
        assert event.facts.num_preemptions == 0
        assert not following.done()
        disturbed = await following
        assert sum(event.facts.num_preemptions for event in disturbed if isinstance(event, Finished)) == 1
        assert are_equal(pictures(disturbed), pictures(quiet))

    run(play())


def count(joins: Path, prompt: str) -> int:
    return sum(line.startswith(prompt) for line in joins.read_text().splitlines())


def test_a_key_that_two_fronts_use_is_denoised_once(run: Run, fronts: list[Cluster], joins: Path) -> None:
    """While it runs, and after it has."""
    order = make_order(prompt="twice", steps=12, key="twice")

    async def play() -> list[Finished]:
        first = [asyncio.create_task(edit(front, order)) for front in fronts]
        answers = [*(await first[0]), *(await first[1])]
        return answers + await edit(fronts[1], order)

    events = run(play())
    assert are_equal(pictures(events[:1] * 2), pictures(events[1:]))
    assert count(joins, "twice") == 1


def test_another_job_with_the_same_key_is_run(run: Run, fronts: list[Cluster], joins: Path) -> None:
    orders = [make_order(prompt=f"mixed up {number}", key="mixed up") for number in range(2)]
    for order in orders:
        pictures(run(edit(fronts[0], order)))
    assert count(joins, "mixed up") == 2


async def die(front: Cluster) -> None:
    """Fall silent without a word, as a front that is killed."""
    supervisor = front._supervisor
    for task in (*supervisor._tasks, *supervisor._supervisions):
        task.cancel()
    supervisor.coordinator.sharing.close()
    supervisor._doorkeeper.close()
    supervisor._context.destroy(linger=0)


def test_jobs_with_a_key_outlive_their_front(
    run: Run, folders: dict[str, Path], fronts: list[Cluster], nodes: Nodes, joins: Path
) -> None:
    order = make_order(prompt="outlives", steps=50, key="outlives")

    async def play() -> tuple[list[Finished], list[Finished]]:
        doomed = Cluster(make_config(folders["sd"]), SharedLauncher(nodes, "doomed"))
        await doomed.start()
        await doomed.until_ready()
        doomed.submit([order])
        doomed.submit([make_order(prompt="is dropped", steps=400)])
        await until(lambda: len(doomed.status().workers[0].running) == 2)
        await until(lambda: fronts[1].workers[0].load.foreign.num_edits == 2)
        await die(doomed)
        nodes.detach("doomed")
        retried = await edit(fronts[1], order)
        await until(lambda: fronts[1].workers[0].load.num_steps == 0)
        return retried, await edit(fronts[1], make_order(prompt="outlives", steps=50))

    retried, undisturbed = run(play())
    assert are_equal(pictures(retried), pictures(undisturbed))
    assert count(joins, "outlives") == 2  # with the undisturbed one
    assert retried[0].facts.num_attempts == 1

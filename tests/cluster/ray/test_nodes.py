"""Workers on the nodes of a real Ray cluster: nodes die, join and are given up, and no edit is lost."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray
import zmq
from helpers.clusters import Run, are_equal, collect, follow, make_config, make_order, pictures, register, until
from helpers.rays import RayFront, RayNodes, make_settings

from instgenie.cluster.orders import Event, Finished, Order
from instgenie.cluster.ray.names import slot_name
from instgenie.cluster.status import ClusterStatus
from instgenie.machine.curve import make_secret, secure_client
from instgenie.scheduling.autoscaler import ScalingConfig

SCALING = ScalingConfig(min_workers=1, max_workers=2, queue_seconds=0.02, idle_seconds=5.0)
NUM_EDITS, NUM_FEW = 60, 16
TENANT = "digest of a key"


@pytest.fixture(scope="module")
def front(rays: RayNodes, folders: dict[str, Path], run: Run, environment: None) -> Iterator[RayFront]:
    """A front that began with one worker and has grown to two under load. Its workers have one process each."""
    config = make_config(folders["sd"], devices=("cpu", "cpu"), batching="naive", max_queue=1000, worker_timeout=60)
    front = RayFront(config, make_settings("nodes", SCALING, rays.address))

    async def start() -> None:
        await front.start()
        await front.cluster.until_ready()
        assert front.num_ready == 1
        await grow(front)

    run(start())
    yield front
    run(front.stop())


def make_orders(num_edits: int = NUM_EDITS) -> list[Order]:
    """Edits that compute every token, that use a template, which a client has registered, and that read what their own
    dense steps leave on their device."""
    return [
        make_order(seed=number, picture_seed=number % 3, reuse=("off", "template", "own")[number % 3])
        for number in range(num_edits)
    ]


async def grow(front: RayFront) -> None:
    """Keep the queue long until there are two workers."""
    while front.num_ready < 2:
        await collect(front.cluster.submit([make_order(steps=20, reuse="off") for _ in range(4)]))


async def answers(front: RayFront, orders: Sequence[Order]) -> list[Event]:
    """Submit all edits, and return the answer of each; there is exactly one."""
    tickets = [front.cluster.submit([order])[0] for order in orders]
    streams = await asyncio.gather(*map(follow, tickets))
    assert [sum(isinstance(event, Finished) for event in events) for events in streams] == [1] * len(orders)
    return [events[-1] for events in streams]


def workers_of(events: Sequence[Event]) -> set[int]:
    return {event.facts.worker for event in events if isinstance(event, Finished)}


def test_the_status_names_nodes_and_fronts(front: RayFront, rays: RayNodes, run: Run) -> None:
    async def play() -> ClusterStatus:
        await until(lambda: len(front.cluster.nodes) == 2)
        return front.cluster.status()

    status = run(play())
    assert {node.name for node in status.nodes} == {worker.node for worker in status.workers}
    assert {name.rsplit("-", 1)[1] for name in (node.name for node in status.nodes)} == {
        node.node_id[:6] for node in rays.nodes
    }
    assert all(node.num_cores > 0 and node.available_bytes > 0 for node in status.nodes)
    assert len(status.fronts) == 1
    links = [worker.load.link for worker in front.cluster.workers]
    assert links[0] is not links[1]


def test_a_node_that_is_killed_costs_no_edit_and_one_that_joins_takes_work(
    front: RayFront, rays: RayNodes, run: Run
) -> None:
    async def play() -> tuple[list[Event], list[Event], list[Event]]:
        cluster = front.cluster
        await register(cluster, TENANT, make_order(picture_seed=1))
        undisturbed = await answers(front, make_orders())
        victim = rays.find(front.node_of(1))
        disturbing = asyncio.create_task(answers(front, make_orders()))
        await until(lambda: cluster.workers[1].denoiser.held)
        rays.kill(victim)
        disturbed = await disturbing
        assert front.num_ready == 1
        rays.add()
        await grow(front)
        return undisturbed, disturbed, await answers(front, make_orders(NUM_FEW))

    undisturbed, disturbed, after = run(play())
    assert workers_of(undisturbed) == {0, 1}
    assert are_equal(pictures(disturbed), pictures(undisturbed))
    facts = [event.facts for event in disturbed if isinstance(event, Finished)]
    assert {one.reuse for one in facts} == {"none", "template", "own"}
    assert max(one.num_attempts for one in facts) == 2
    assert workers_of(after) == {0, 1}
    assert are_equal(pictures(after), pictures(undisturbed[:NUM_FEW]))


def can_speak(secret: str, address: str, ms: int) -> bool:
    """True if a process with this secret can connect."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        with peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
            secure_client(peer, secret)
            peer.connect(address)
            connected = bool(events.poll(ms))
            peer.disable_monitor()
        return connected


def test_only_holders_of_the_secret_can_speak_to_a_front(front: RayFront) -> None:
    assert can_speak(front.launcher.secret, front.launcher.address, 60_000)
    assert not can_speak("", front.launcher.address, 500)
    assert not can_speak(make_secret(), front.launcher.address, 500)


def test_the_controller_is_replaced_while_edits_run(front: RayFront, run: Run) -> None:
    async def play() -> tuple[list[Event], list[str], list[str]]:
        before = [front.node_of(0), front.node_of(1)]
        pids = [worker.pid for worker in front.cluster.status().workers]
        running = asyncio.create_task(answers(front, make_orders(NUM_FEW)))
        ray.kill(front.launcher.controller, no_restart=False)
        events = await running
        front.launcher.slots.clear()
        await until(lambda: all(front.launcher.facts_of(worker) for worker in (0, 1)))
        assert [worker.pid for worker in front.cluster.status().workers] == pids
        return events, before, [front.node_of(0), front.node_of(1)]

    events, before, after = run(play())
    assert len(pictures(events)) == NUM_FEW
    assert before == after


def test_an_actor_that_dies_costs_no_edit(front: RayFront, run: Run) -> None:
    async def play() -> list[Event]:
        actor = ray.get_actor(slot_name(1))
        running = asyncio.create_task(answers(front, make_orders(NUM_FEW)))
        await until(lambda: front.cluster.workers[1].denoiser.held)
        ray.kill(actor, no_restart=False)
        events = await running
        await grow(front)
        return events

    assert len(pictures(run(play()))) == NUM_FEW


def test_an_idle_worker_is_given_up_without_losing_an_edit(front: RayFront, run: Run) -> None:
    async def play() -> list[Event]:
        cluster, events = front.cluster, []
        while 1 in front.launcher.slots:
            events += await collect(cluster.submit([make_order(steps=2, reuse="off")]))
            await asyncio.sleep(0.5)
        return events + await answers(front, [make_order(reuse="off")])

    events = run(play())
    assert all(isinstance(event, Finished) for event in events)
    assert workers_of(events[-1:]) == {0}
    assert list(front.launcher.slots) == [0]
    assert not front.cluster.workers[1].is_ready


def test_a_node_that_is_cut_off_is_replaced_and_its_late_answers_are_ignored(
    front: RayFront, rays: RayNodes, run: Run
) -> None:
    """The only worker's node stops answering, and comes back when its edits are done elsewhere: by this worker or, if
    the cluster has grown before Ray gave the node up, by another one."""

    async def play() -> tuple[list[Event], int]:
        victim = rays.find(front.node_of(0))
        running = asyncio.create_task(answers(front, make_orders(NUM_FEW)[::2]))
        await until(lambda: front.cluster.workers[0].denoiser.held)
        with rays.stopped(victim):
            events = await running
            num_finished = front.cluster.status().num_finished
        events += await answers(front, [make_order(reuse="off")])
        await asyncio.to_thread(rays.kill, victim)
        await until(lambda: (nodes := front.nodes) and victim.node_id not in nodes)
        return events, front.cluster.status().num_finished - num_finished

    events, num_more = run(play())
    rays.add()  # for the tests to come
    assert len(pictures(events)) == NUM_FEW // 2 + 1
    assert num_more == 1

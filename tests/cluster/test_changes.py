"""A cluster looks only at workers for which something has changed. It must find what a look at all of them finds."""

from collections import Counter

import pytest
from helpers.fake_cluster import FakeCluster, make_order
from hypothesis import example, given, settings
from hypothesis import strategies as st

from instgenie.cluster import wire
from instgenie.cluster.config import Role
from instgenie.cluster.entries import EditEntry, Ticket
from instgenie.scheduling.router import COSTS, MAX_SCANNED, Work

ROLES: tuple[Role, ...] = ("prepare", "denoise", "finish")
NUM_WORKERS = 2
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["accept", "group", "cancel", "kill", "revive", "ask", "join", *ROLES]), st.integers(0, 5)
    ),
    max_size=60,
)


def play(cluster: FakeCluster, tickets: list[Ticket], event: str, number: int) -> None:
    """Let something happen to a cluster, if it can happen now."""
    worker, role = number % NUM_WORKERS, ROLES[number // NUM_WORKERS]
    process = cluster.process(role, worker)
    match event:
        case "accept":
            tickets += cluster.accept(make_order(number, picture_seed=number))
        case "group":
            tickets += cluster.accept(*(make_order(seed) for seed in range(3)))
        case "cancel" if tickets:
            tickets.pop(number % len(tickets)).cancel()
        case "kill" if process.is_ready:
            cluster.kill(role, worker)
            cluster.take(role, worker)
        case "revive" if not process.is_ready:
            cluster.revive(process)
        case "ask":
            cluster.ask_for_template()
        case "join" if cluster.process("denoise", worker).is_ready:
            held = [entry for entry in cluster.process("denoise", worker).held.values() if isinstance(entry, EditEntry)]
            jobs = tuple(wire.JobStep(entry.id, entry.attempt, 0) for entry in held[:2])
            cluster.answer("denoise", worker, wire.Joined(jobs, ((),) * len(jobs)))
        case "prepare" | "denoise" | "finish" if cluster.process(event, worker).is_ready:
            getattr(cluster, event)(worker)


def positions_of(cluster: FakeCluster) -> dict[str, int]:
    """How many edits of other requests are ahead of each waiting edit, counted from scratch."""
    found: dict[str, int] = {}
    ahead: Counter[int] = Counter()
    own: Counter[tuple[int, int]] = Counter()
    for entry in sorted(cluster.entries.values(), key=lambda entry: entry.number):
        if entry.is_waiting:
            found[entry.id] = ahead[entry.worker] - own[entry.worker, id(entry.group)]
            ahead[entry.worker] += 1
            own[entry.worker, id(entry.group)] += 1
    return found


@settings(max_examples=100, deadline=None)
@example([("kill", 0), ("kill", 1), ("accept", 0), ("accept", 1), ("revive", 0), ("revive", 1)])
@given(EVENTS)
def test_a_cluster_finds_what_a_look_at_all_workers_finds(events: list[tuple[str, int]]) -> None:
    cluster = FakeCluster(devices=("cpu",) * NUM_WORKERS, max_batch_size=1)
    cluster.open()
    tickets: list[Ticket] = []
    placement, edits = cluster.coordinator.placement, cluster.coordinator.edits
    for event, number in events:
        play(cluster, tickets, event, number)
        assert not [process for process in placement.processes if process.is_ready and process.next()]  # all is sent
        assert placement.ready_loads == [worker.load for worker in cluster.workers if worker.is_ready]
        told = cluster.reporter._positions
        assert {id: told[id] for id in positions_of(cluster)} == positions_of(cluster)
        assert edits.num_outside_batches == sum(not entry.is_running for entry in edits.entries.values())
        for worker in cluster.workers:
            assert set(worker.edits) == {id for id, entry in edits.entries.items() if entry.worker == worker.index}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30), st.booleans()), min_size=12, max_size=60),
    st.booleans(),
)
def test_the_choice_among_all_workers_is_the_plain_one(edits: list[tuple[int, int, bool]], must_reuse: bool) -> None:
    """Whatever happened before, the worker is the ready one that finishes first by its sums, made from scratch."""
    cluster = FakeCluster(devices=("cpu",) * 12)
    placement = cluster.coordinator.placement
    for number, (worker, num_steps, is_up) in enumerate(edits):
        load = cluster.workers[worker].load
        load.templates["cat"] = ("gpu", "host", "disk")[number % 3]
        load.add(f"{number}", num_steps, 100, load.costs.price(1000, 100, "host"))
        load.step(f"{number}")
        if number % 4 == 3:
            load.remove(f"{number}")
        for process in cluster.workers[worker].processes.values():
            process.state = "ready" if is_up else "down"
        work = Work(10, 1000, 100 + number, "cat", must_reuse=must_reuse)
        ready = [one.load for one in cluster.workers if one.is_ready] or [one.load for one in cluster.workers]
        best = min(ready, key=lambda load: (COSTS["mask_aware"](work, load), load.turn))
        assert placement.choose([work], [worker]).index == best.worker


@pytest.mark.parametrize("num_ready", [MAX_SCANNED // 2, 10 * MAX_SCANNED])
def test_the_choice_among_many_slots_is_a_ready_one(num_ready: int) -> None:
    """Most slots of a large cluster may wait for a node."""
    cluster = FakeCluster(devices=("cpu",) * 20 * MAX_SCANNED)
    ready = cluster.workers[::2][:num_ready]
    for worker in ready:
        for process in worker.processes.values():
            process.state = "ready"
    chosen = {cluster.coordinator.placement.choose([Work(10, 100, 10)], range(40)).index for _ in range(200)}
    assert chosen <= {worker.index for worker in ready}
    assert len(chosen) > min(num_ready, 100) * 0.9

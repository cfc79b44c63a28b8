"""Workers that have lost their node, wait for one or are given up: others do their work."""

from helpers.fake_cluster import FakeCluster, events, make_order

from instgenie.cluster.config import Role
from instgenie.cluster.orders import Finished
from instgenie.cluster.processes import are_broken, place

ROLES: tuple[Role, ...] = ("prepare", "denoise", "finish")


def make_two() -> FakeCluster:
    cluster = FakeCluster(devices=("cpu", "cpu"))
    cluster.open()
    return cluster


def lose(cluster: FakeCluster, worker: int) -> None:
    """Lose a worker's node, and with it all its processes."""
    cluster.workers[worker].has_lost_node = True
    for role in ROLES:
        cluster.kill(role, worker)
        cluster.take(role, worker)


def test_a_registration_moves_to_another_worker_when_its_node_is_lost() -> None:
    cluster = make_two()
    template = cluster.ask_for_template()
    [own] = template.entries
    lose(cluster, own)
    cluster.prepare(1 - own)
    cluster.register(1 - own)
    assert template.state == "ready"
    assert list(template.holders) == [1 - own]


def test_a_template_whose_node_is_lost_is_registered_on_another_worker() -> None:
    cluster = make_two()
    template = cluster.ask_for_template()
    [own] = template.entries
    cluster.prepare(own)
    cluster.register(own)
    assert list(template.holders) == [own]
    lose(cluster, own)
    cluster.prepare(1 - own)
    cluster.register(1 - own)
    assert template.state == "ready"
    assert list(template.holders) == [1 - own]


def test_an_edit_that_waits_for_a_registration_goes_on_elsewhere() -> None:
    cluster = make_two()
    template = cluster.ask_for_template()
    [own] = template.entries
    cluster.prepare(own)
    cluster.register(own)
    cluster.workers[own].drain()  # the edit goes to the worker that lacks the template
    [ticket] = cluster.accept(make_order())
    cluster.workers[own].drain(False)
    cluster.prepare(1 - own)
    assert ticket._entry.stage == "park"
    lose(cluster, 1 - own)
    cluster.denoise(own)
    cluster.finish(own)
    assert isinstance(events(ticket)[-2], Finished)


def test_what_is_lost_while_no_other_worker_is_ready_moves_to_the_next_that_is() -> None:
    cluster = FakeCluster(devices=("cpu", "cpu"))
    cluster.open(0)
    template = cluster.ask_for_template()
    lose(cluster, 0)
    assert list(template.entries) == [0]
    cluster.open(1)
    cluster.prepare(1)
    cluster.register(1)
    assert template.state == "ready"
    assert list(template.holders) == [1]


def test_a_worker_that_drains_finishes_what_it_has_and_gets_no_more() -> None:
    cluster = make_two()
    [first] = cluster.accept(make_order())
    own = first._entry.worker
    worker = cluster.workers[own]
    worker.drain()
    others = [cluster.accept(make_order(seed=seed))[0] for seed in range(1, 5)]
    assert {ticket._entry.worker for ticket in others} == {1 - own}
    assert worker.has_work
    cluster.run(own)
    assert isinstance(events(first)[-2], Finished)
    assert first._entry.worker == own
    worker.drain(False)
    assert worker.takes_edits


def test_workers_that_wait_for_a_node_are_no_reason_to_hope() -> None:
    cluster = make_two()
    place(cluster.workers, {0: "a"})
    assert not are_broken(cluster.workers)
    cluster.process("denoise", 0).state = "failed"
    assert are_broken(cluster.workers)
    place(cluster.workers, {})
    assert not are_broken(cluster.workers)

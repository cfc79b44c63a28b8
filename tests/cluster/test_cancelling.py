"""Cancelled edits cost nothing more, and accepted ones count until they are answered."""

import pytest
from helpers.fake_cluster import FakeCluster, events, make_order

from instgenie.cluster import wire
from instgenie.cluster.config import Role
from instgenie.cluster.orders import Finished
from instgenie.errors import QueueFullError


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster(max_queue=64)
    cluster.open()
    return cluster


def test_cancelled_edits_are_never_sent_to_be_prepared(cluster: FakeCluster) -> None:
    tickets = [cluster.accept(make_order(seed))[0] for seed in range(50)]
    for ticket in tickets:
        ticket.cancel()
    sent = cluster.take("prepare")
    assert [type(message) for message in sent] == [wire.Prepare, wire.Prepare, wire.Cancel, wire.Cancel]
    [victim] = cluster.accept(make_order())
    assert not cluster.take("prepare")  # the process may still work on the first one
    for message in sent[2:]:
        cluster.drop("prepare", message)
    assert [message.id for message in cluster.take("prepare")] == [victim.id]
    assert not cluster.process("prepare").leaving


def test_a_late_answer_to_a_cancelled_edit_is_ignored(cluster: FakeCluster) -> None:
    [ticket] = cluster.accept(make_order())
    ticket.cancel()
    cluster.prepare()
    assert not cluster.take("denoise")
    assert not cluster.entries


@pytest.mark.parametrize("role", ["prepare", "denoise", "finish"])
def test_each_process_is_told_to_drop_what_it_works_on(cluster: FakeCluster, role: Role) -> None:
    [ticket] = cluster.accept(make_order())
    if role != "prepare":
        cluster.prepare()
    if role == "finish":
        cluster.denoise()
    ticket.cancel()
    assert cluster.take(role)[-1] == wire.Cancel(ticket.id)
    assert cluster.process(role).leaving == {ticket.id}
    cluster.kill(role)
    assert not cluster.process(role).leaving  # a process that died drops everything


def test_partial_pictures_of_a_cancelled_edit_are_dropped(cluster: FakeCluster) -> None:
    [ticket] = cluster.accept(make_order(num_partials=2))
    cluster.prepare()
    ticket.cancel()
    assert cluster.take("finish") == [wire.Cancel(ticket.id)]


def test_a_cancelled_edit_does_not_hold_up_its_group(cluster: FakeCluster) -> None:
    first, second = cluster.accept(make_order(1), make_order(2))
    [one, other] = cluster.take("prepare")
    assert [one.id, other.id] == [first.id, second.id]
    cluster.prepared(one)
    second.cancel()
    cluster.denoise()
    cluster.finish()
    assert isinstance(events(first)[-2], Finished)


def test_edits_count_until_they_are_answered() -> None:
    """Edits pile up at a finish process that does not answer."""
    cluster = FakeCluster(max_queue=2)
    cluster.open()
    for seed in range(2):
        cluster.accept(make_order(seed))
        cluster.prepare()
        cluster.denoise()
    with pytest.raises(QueueFullError, match="2 edits are waiting: at most 2"):
        cluster.accept(make_order())
    cluster.finish()
    cluster.accept(make_order())


def test_edits_in_a_batch_do_not_count() -> None:
    cluster = FakeCluster(max_queue=2)
    cluster.open()
    for seed in range(4):
        [ticket] = cluster.accept(make_order(seed))
        cluster.prepare()
        cluster.answer("denoise", 0, wire.Joined((wire.JobStep(ticket.id, 1, 0),), ((),)))
    assert cluster.coordinator.edits.num_outside_batches == 0

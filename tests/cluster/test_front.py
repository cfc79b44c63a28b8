"""Accepting, deciding, cancelling: what happens to an edit before and beside its stages."""

from typing import Any

import pytest
from helpers.fake_cluster import FakeCluster, events, make_lasting, make_order

from instgenie.cluster import wire
from instgenie.cluster.orders import Finished, Queued
from instgenie.errors import QueueFullError
from instgenie.types import TierName


def test_a_full_queue_refuses_edits() -> None:
    cluster = FakeCluster(max_queue=3)
    cluster.open()
    tickets = cluster.accept(*(make_order(seed) for seed in range(3)))
    with pytest.raises(QueueFullError, match="3 edits are waiting: at most 3") as full:
        cluster.accept(make_order())
    assert (full.value.num_waiting, full.value.limit) == (3, 3)
    assert full.value.retry_after >= 1
    tickets[0].cancel()
    cluster.accept(make_order())


@pytest.mark.parametrize(
    "change",
    [{"tenant": "you"}, {"steps": 3}, {"picture_seed": 1}, {"quality": "exact"}, {"strength": 0.5}, {"guidance": 9.0}],
)
def test_which_edits_share_activations(change: dict[str, Any]) -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.edit_and_register(make_order())
    [ticket] = cluster.accept(make_order(**change))
    is_hit = ticket._entry.template is not None
    # strength runs the last of the same steps, and guidance is no input of this network
    assert is_hit == bool({"guidance", "strength"} & set(change))


@pytest.mark.parametrize("tier", ["disk", "remote", None])
def test_a_worker_says_whether_an_unknown_template_is_below(tier: TierName | None) -> None:
    cluster = make_lasting()
    [ticket] = cluster.accept(make_order())
    [(_, fetch)] = cluster.fetches
    cluster.prepare()
    [message] = cluster.take("denoise")
    [job] = message.jobs
    assert (job.template, job.must_reuse) == (fetch.template, False)
    assert cluster.reporter.counts["queries"] == 0
    cluster.found(job, tier)
    assert (cluster.reporter.counts["queries"], dict(cluster.reporter.cache_hits)) == (1, {tier: 1} if tier else {})
    cluster.kill("denoise")
    cluster.revive(cluster.process("denoise"))
    if tier:  # the worker died before it told what is on disk
        cluster.prepare()
        cluster.register()
    [message] = [message for message in cluster.take("denoise") if isinstance(message, wire.Denoise)]
    assert [bool(job.template and job.must_reuse) for job in message.jobs] == [tier is not None]
    cluster.denoised(message.jobs[0])
    cluster.finish()
    finished = events(ticket)[-2]
    assert isinstance(finished, Finished)
    assert (finished.facts.cache_tier is None) == (tier is None)
    assert cluster.reporter.counts["queries"] == 1


def test_cancelled_edits_leave_every_stage() -> None:
    cluster = FakeCluster()
    cluster.open()
    for num_stages in range(3):
        [ticket] = cluster.accept(make_order())
        for play in (cluster.prepare, cluster.denoise)[:num_stages]:
            play()
        cluster.coordinator.cancel(ticket._entry)
        cluster.coordinator.cancel(ticket._entry)
        assert not cluster.entries
        assert not any(process.held or process.queue for process in cluster.workers[0].processes.values())
        assert events(ticket)[-1] is None
    assert cluster.reporter.counts["cancelled"] == 3


def test_a_cancelled_job_leaves_its_batch() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order())
    cluster.prepare()
    ticket.cancel()
    assert cluster.take("denoise")[-1] == wire.Cancel(ticket.id)


def test_waiting_edits_hear_their_position() -> None:
    cluster = FakeCluster()
    cluster.open()
    tickets = [cluster.accept(make_order(seed))[0] for seed in range(3)]
    tickets[0].cancel()
    assert [events(ticket) for ticket in tickets[1:]] == [[Queued(1), Queued(0)], [Queued(2), Queued(1)]]


def test_a_position_counts_only_edits_of_other_requests() -> None:
    cluster = FakeCluster()
    cluster.open()
    first = cluster.accept(make_order(1), make_order(2))
    second = cluster.accept(make_order(3), make_order(4))
    assert [events(ticket) for ticket in first] == [[Queued(0)], [Queued(0)]]
    assert [events(ticket) for ticket in second] == [[Queued(2)], [Queued(2)]]

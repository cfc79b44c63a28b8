"""An edit on its way through prepare, denoise and finish."""

import time

import msgspec
import pytest
from helpers.fake_cluster import JOB, LATENTS, FakeCluster, events, make_order

from instgenie.cluster import wire
from instgenie.cluster.orders import Failed, Finished, Partial, Queued, Stepped
from instgenie.scheduling.margin import NUM_SEEN
from instgenie.scheduling.names import Batching
from instgenie.scheduling.scheduler import LONG


def test_an_order_goes_through_all_stages() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order(seed=5, num_partials=1))
    cluster.prepare()
    [message] = cluster.take("denoise")
    [job] = message.jobs
    denoiser = cluster.process("denoise")
    cluster.coordinator.handle(denoiser, wire.Joined((wire.JobStep(job.id, 1, 0),), ((),)), [])
    cluster.coordinator.handle(denoiser, wire.BatchStepped(0.1, 0.1, 0, (wire.JobStep(job.id, 1, 1),)), [])
    cluster.coordinator.handle(denoiser, wire.Glimpsed(job.id, 1, 0, LATENTS), [b"\0" * 4])
    cluster.finish()
    cluster.denoised(job)
    cluster.finish()
    queued, stepped, partial, finished, end = events(ticket)
    assert (queued, stepped, end) == (Queued(0), Stepped(1, 4), None)
    assert isinstance(partial, Partial)
    assert isinstance(finished, Finished)
    assert finished.picture == b"png"
    facts = finished.facts
    assert (facts.seed, facts.num_tokens, facts.num_masked_tokens, facts.num_attempts) == (5, 16, 4, 1)
    assert (facts.finish_seconds, facts.finish_thread_seconds) == pytest.approx((0.7, 0.6))
    assert cluster.workers[0].load.side_seconds["finish"] == pytest.approx(0.15)  # four threads
    assert not cluster.entries
    assert cluster.workers[0].load.num_edits == 0


def test_orders_wait_for_the_first_worker_that_is_ready() -> None:
    cluster = FakeCluster(devices=("cpu", "cpu"))
    tickets = [cluster.accept(make_order(seed))[0] for seed in range(4)]
    assert not cluster.sent
    cluster.open(1)
    cluster.run(1)
    assert all(isinstance(events(ticket)[-2], Finished) for ticket in tickets)


def test_a_group_is_denoised_in_one_message() -> None:
    cluster = FakeCluster()
    cluster.open()
    cluster.accept(*(make_order(seed) for seed in range(3)))
    prepared = cluster.take("prepare")
    assert len(prepared) == 2
    for m in prepared:
        cluster.answer("prepare", 0, wire.Prepared(m.id, 1, JOB, 16, 4, 4, 0.1), b"\0" * 4)
    assert not cluster.take("denoise")
    cluster.prepare()
    [message] = cluster.take("denoise")
    assert len(message.jobs) == 3


def test_a_group_does_not_wait_for_a_member_that_failed_or_left() -> None:
    cluster = FakeCluster()
    cluster.open()
    first, second, third = cluster.accept(*(make_order(seed) for seed in range(3)))
    cluster.answer("prepare", 0, wire.JobFailed(first.id, 1, "bad_input", "no"))
    second.cancel()
    cluster.sent = [sent for sent in cluster.sent if sent[1].id == third.id]  # type: ignore[attr-defined]
    cluster.prepare()
    [message] = cluster.take("denoise")
    assert [job.id for job in message.jobs] == [third.id]
    assert events(first)[1:] == [Failed("bad_input", "no"), None]
    assert events(second)[-1] is None


def test_long_edits_do_not_take_all_places_of_a_worker() -> None:
    """Two groups of long edits fill what a worker holds; a short edit is sent to it all the same."""
    cluster = FakeCluster(max_batch_size=4)
    cluster.open()

    def prepare() -> None:
        while m := cluster.next("prepare", 0):
            num_steps = m.wish.steps
            cluster.answer("prepare", 0, wire.Prepared(m.id, m.attempt, JOB, 16, 4, num_steps, 0.1), b"\0" * 4)

    groups = [cluster.accept(*(make_order(seed, steps=LONG + 1) for seed in range(5))) for _ in range(3)]
    prepare()
    sent = cluster.take("denoise")
    assert [[job.id for job in message.jobs] for message in sent] == [[ticket.id for ticket in groups[0]]]
    short = [cluster.accept(make_order(seed, steps=4))[0] for seed in range(5)]
    prepare()
    sent += cluster.take("denoise")
    assert [job.id for message in sent[1:] for job in message.jobs] == [ticket.id for ticket in short[:4]]
    for job in sent[0].jobs[:2]:
        cluster.denoised(job)
    assert [len(message.jobs) for message in cluster.take("denoise")] == [5]  # the next group


@pytest.mark.parametrize("batching", ["naive", "static"])
def test_some_workers_have_one_process(batching: Batching) -> None:
    cluster = FakeCluster(batching=batching)
    cluster.open()
    [ticket] = cluster.accept(make_order())
    process = cluster.process("denoise")
    [prepare] = cluster.take("denoise")
    cluster.coordinator.handle(process, wire.Prepared(prepare.id, 1, JOB, 16, 4, 4, 0.1), [b"\0" * 4])
    cluster.denoise()
    [finish] = cluster.take("denoise")
    cluster.coordinator.handle(process, wire.Painted(finish.id, 1, None, 0.1), [b"png"])
    assert isinstance(events(ticket)[-2], Finished)


def test_corrected_costs_change_what_a_predicted_second_takes_once() -> None:
    """A worker corrects its costs again and again; only the first time their unit changes."""
    cluster = FakeCluster()
    cluster.open()
    denoiser, load = cluster.process("denoise"), cluster.workers[0].load
    for _ in range(60):
        cluster.coordinator.handle(denoiser, wire.BatchStepped(0.7, 0.1, 0, ()), [])
    corrected = msgspec.structs.replace(load.costs, ratio=3.0)
    cluster.coordinator.handle(denoiser, wire.Priced(corrected), [])
    assert load.costs == corrected
    assert load.pace.per_second == pytest.approx(3.0)
    for _ in range(60):
        cluster.coordinator.handle(denoiser, wire.BatchStepped(0.5, 0.1, 0, ()), [])
    known = load.pace.per_second
    cluster.coordinator.handle(denoiser, wire.Priced(msgspec.structs.replace(corrected, per_job=0.1)), [])
    assert load.pace.per_second == known
    assert load.costs.per_job == 0.1


def test_jobs_have_to_be_denoised_before_their_deadline_by_what_finishing_takes() -> None:
    """Not only decoding counts, but all that lies between the last step and the answer."""
    cluster = FakeCluster()
    cluster.open()
    cluster.accept(make_order(0))
    cluster.run()
    margin = cluster.workers[0].load.margin
    assert margin.seconds > 0
    for _ in range(NUM_SEEN):
        margin.measure(4.0)
    cluster.accept(make_order(1, deadline=time.monotonic() + 30))
    cluster.prepare()
    *_, message = cluster.take("denoise")
    assert 24 < message.jobs[0].seconds_left <= 26

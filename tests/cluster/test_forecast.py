"""The time left of a request counts all of its edits, and is corrected by the pace that they are seen to have."""

import time

import pytest
from helpers.fake_cluster import FakeCluster, events, make_order

from instgenie.cluster import wire
from instgenie.cluster.entries import Ticket
from instgenie.cluster.orders import Queued, Stepped
from instgenie.cluster.wire.commands import Denoising


def left_of(ticket: Ticket) -> list[float | None]:
    return [event.seconds_left for event in events(ticket) if isinstance(event, Queued | Stepped)]


def step(cluster: FakeCluster, jobs: list[Denoising], number: int, seconds: float) -> None:
    """Let the jobs take a step that was predicted to take no time; each of their steps takes `seconds`."""
    for job in jobs:
        cluster.entries[job.id].joined_at = time.monotonic() - number * seconds
    steps = tuple(wire.JobStep(job.id, job.attempt, number) for job in jobs)
    cluster.answer("denoise", 0, wire.BatchStepped(seconds, 1e-6, 0, steps))


def join(cluster: FakeCluster, jobs: list[Denoising]) -> None:
    told = tuple(wire.JobStep(job.id, job.attempt, 0) for job in jobs)
    cluster.answer("denoise", 0, wire.Joined(told, tuple((False,) * 3 for _ in jobs)))


def started(cluster: FakeCluster, num_edits: int) -> tuple[list[Ticket], list[Denoising]]:
    tickets = cluster.accept(*(make_order(seed) for seed in range(num_edits)))
    cluster.prepare()
    jobs = [job for message in cluster.take("denoise") for job in message.jobs]
    joining = jobs[: cluster.config.max_batch_size]
    join(cluster, joining)
    return tickets, joining


def test_nothing_is_promised_before_the_first_step() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket] = cluster.accept(make_order())
    assert left_of(ticket) == [None]


def test_remaining_steps_take_at_least_what_the_last_ones_took() -> None:
    cluster = FakeCluster()
    cluster.open()
    [ticket], jobs = started(cluster, 1)
    for number in (1, 2, 3, 4):
        step(cluster, jobs, number, seconds=3.0)
    queued, *left = left_of(ticket)
    assert queued is None
    for number, seconds in zip((1, 2, 3, 4), left, strict=True):
        assert seconds is not None
        assert seconds >= 3.0 * (4 - number)
    assert left[-1] == pytest.approx(0.1)  # no picture was finished yet: it is taken to last as long as preparing


def test_variants_that_wait_for_room_and_pictures_to_finish_are_counted() -> None:
    cluster = FakeCluster(max_batch_size=2)
    cluster.open()
    cluster.workers[0].load.side_seconds["finish"] = 5.0
    tickets, jobs = started(cluster, 4)
    step(cluster, jobs, 1, seconds=3.0)
    left = left_of(tickets[0])[-1]
    assert left is not None
    assert left >= 3 * 3.0 + 4 * 3.0 + 4 * 5.0  # its own steps, those of the two that wait, four pictures
    later = cluster.accept(make_order(9))[0]
    promised = left_of(later)[-1]
    assert promised is not None
    assert promised > 5.0  # others' steps, its own, and its picture


def test_preparing_is_counted_for_every_variant() -> None:
    cluster = FakeCluster()
    cluster.open()
    _, jobs = started(cluster, 1)
    step(cluster, jobs, 1, seconds=0.001)
    cluster.workers[0].load.side_seconds["prepare"] = 7.0
    tickets = cluster.accept(*(make_order(seed) for seed in range(4)))
    left = left_of(tickets[0])[-1]
    assert left is not None
    assert left >= 4 * 7.0

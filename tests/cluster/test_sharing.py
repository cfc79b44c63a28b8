"""Workers that this front shares with others: what it tells them, what it learns from them."""

import asyncio
import time
from collections.abc import Callable

import pytest
from helpers.fake_cluster import FakeCluster, make_order

from instgenie.cluster import wire
from instgenie.cluster.entries import Numbers
from instgenie.cluster.sharing import STALE_SECONDS
from instgenie.scheduling.backlog import NO_LOAD, LoadSums

BUSY = LoadSums(num_edits=4, num_steps=400, num_token_steps=6400, compute=40.0)


def played(play: Callable[[FakeCluster], None]) -> None:
    """Play with two workers, in an event loop."""

    async def inside() -> None:
        cluster = FakeCluster(devices=("cpu", "cpu"), auto_register=False)
        cluster.open()
        play(cluster)
        cluster.coordinator.sharing.close()

    asyncio.run(inside())


def share(cluster: FakeCluster, worker: int, load: LoadSums = NO_LOAD, num_fronts: int = 2) -> None:
    cluster.answer("denoise", worker, wire.Foreign(load, num_fronts))


def test_the_router_counts_what_other_fronts_have_given() -> None:
    def play(cluster: FakeCluster) -> None:
        for busy, idle in ((0, 1), (1, 0)):
            share(cluster, busy, BUSY)
            share(cluster, idle)
            [ticket] = cluster.accept(make_order())
            assert cluster.entries[ticket.id].worker == idle
            cluster.run(idle)
        assert cluster.workers[1].load.num_edits == 4
        share(cluster, 1)
        assert cluster.workers[1].load.seconds == 0

    played(play)


def test_a_worker_is_told_what_this_front_has_given_to_it() -> None:
    def play(cluster: FakeCluster) -> None:
        sharing = cluster.coordinator.sharing
        share(cluster, 0, BUSY)
        sharing.tell(1000.0)
        assert cluster.take("denoise", 0) == [wire.Assigned(NO_LOAD)]  # a sign of life
        assert cluster.take("prepare", 0) == cluster.take("finish", 0) == [wire.Beat()]
        assert cluster.take("denoise", 1) == []  # it serves no other front
        cluster.accept(make_order(home=0))
        sharing.tell(1000.1)
        sharing.tell(1000.2)
        [assigned] = [message for message in cluster.take("denoise", 0) if isinstance(message, wire.Assigned)]
        assert (assigned.load.num_edits, assigned.load.num_steps) == (1, 4)
        assert assigned.load == cluster.workers[0].load.own
        cluster.run(0)
        sharing.tell(1000.3)
        assert cluster.take("denoise", 0)[-1] == wire.Assigned(NO_LOAD)

    played(play)


def test_a_worker_of_which_nothing_fresh_is_known_gets_no_edit_unless_all_are_so() -> None:
    def play(cluster: FakeCluster) -> None:
        now = 1000.0
        for worker in (0, 1):
            share(cluster, worker)
            cluster.workers[worker].denoiser.heard_at = now
        cluster.workers[1].denoiser.heard_at -= 2 * STALE_SECONDS
        cluster.coordinator.sharing.tell(now)
        workers = {cluster.entries[cluster.accept(make_order(seed))[0].id].worker for seed in range(4)}
        assert workers == {0}
        cluster.workers[0].denoiser.heard_at -= 2 * STALE_SECONDS
        cluster.coordinator.sharing.tell(now)
        cluster.accept(make_order(9))
        cluster.workers[1].denoiser.heard_at = now
        cluster.coordinator.sharing.tell(now)
        assert cluster.entries[cluster.accept(make_order(10))[0].id].worker == 1

    played(play)


def test_a_worker_that_died_has_no_work_of_others() -> None:
    def play(cluster: FakeCluster) -> None:
        share(cluster, 0, BUSY)
        cluster.kill("denoise", 0)
        assert cluster.workers[0].load.num_steps == 0
        assert cluster.workers[0].num_fronts == 0

    played(play)


def test_an_edit_goes_to_the_worker_that_has_its_key() -> None:
    def play(cluster: FakeCluster) -> None:
        share(cluster, 1, BUSY)
        placed = []
        cluster.coordinator.placement.on_placed = lambda key, worker: placed.append((key, worker))
        [ticket] = cluster.accept(make_order(key="name/0", home=1))
        assert cluster.entries[ticket.id].worker == 1
        assert placed[0] == ("name/0", 1)
        cluster.kill("denoise", 1)
        cluster.prepare(1)
        assert cluster.entries[ticket.id].worker == 0
        assert placed[-1] == ("name/0", 0)
        [message] = [message for message in cluster.take("denoise", 0) if isinstance(message, wire.Denoise)]
        assert message.jobs[0].key == "name/0"
        [other] = cluster.accept(make_order(key="other/0", home=1))
        assert cluster.entries[other.id].worker == 0  # its home is down

    played(play)


def test_templates_of_other_fronts_are_taken_up_and_dropped() -> None:
    def play(cluster: FakeCluster) -> None:
        order = cluster.naming.template_order("me", make_order().picture, None, None)
        head = cluster.naming.head_of(order.id, order, cluster.workers[0])
        assert head is not None
        cluster.answer("denoise", 0, wire.Announced((wire.Listing(head, (64, 64), 4, {}, True),)))
        cluster.kept(order.id, 0, host=1000)
        template = cluster.library.templates[order.id]
        assert (template.state, template.is_asked_for, list(template.holders)) == ("ready", True, [0])
        assert cluster.library.is_ready(order.id)
        cluster.answer("denoise", 0, wire.Forgotten(order.id))
        assert not cluster.library.templates
        assert cluster.workers[0].load.templates == {}

    played(play)


def test_a_front_charges_its_tenants_for_their_part_of_a_step() -> None:
    cluster = FakeCluster(scheduling="preemptive")
    cluster.open()
    cluster.accept(make_order())
    cluster.prepare()
    [job] = [job for sent in cluster.take("denoise") if isinstance(sent, wire.Denoise) for job in sent.jobs]
    stepped = wire.BatchStepped(2.0, 2.0, 0, (wire.JobStep(job.id, job.attempt, 1),), num_others=3)
    cluster.answer("denoise", 0, stepped)
    shares = cluster.workers[0].policy.shares
    assert shares._used == {"me": pytest.approx(0.5)}


def test_edits_of_several_fronts_are_ordered_by_their_age() -> None:
    """Fronts number their edits by the clock, so that a worker can tell which of two is older."""
    one, other = Numbers(), Numbers()
    numbers = [front.next() for front in (one, other, other, one) for _ in range(3)]
    assert numbers[:3] == sorted(set(numbers[:3]))
    time.sleep(0.001)
    assert other.next() > max(numbers)
    assert one.next() > max(numbers)

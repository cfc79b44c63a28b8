"""Fetches as the router prices them: from peers, from a remote tier, or none because registering is quicker."""

from dataclasses import replace

import msgspec
import pytest

from instgenie.cost.table import DEFAULT_COSTS, StepCosts
from instgenie.scheduling.fetches import PRIOR_BYTES, FetchRates, PeerMap
from instgenie.scheduling.router import Router, Work, WorkerLoad, predicted_finish
from instgenie.types import TierName

WORK = Work(10, 1000, 100, template="cat", must_reuse=True)  # registering it takes 0.2 s


def costs(peer: float = 0.01, remote: float = 1.0) -> StepCosts:
    """A template of `WORK` takes so many seconds from a peer and from the remote tier."""
    per_byte = {"peer": (0.0, peer / 10_000), "remote": (0.0, remote / 10_000)}
    made = {field: getattr(DEFAULT_COSTS, field) for field in DEFAULT_COSTS.__struct_fields__}
    return StepCosts(**made | {"bytes_per_token": 1.0, "fetch": per_byte})


def pair(queued: int = 0, tier: TierName | None = None, **prices: float) -> tuple[WorkerLoad, WorkerLoad]:
    """A worker that holds the template and has a queue, and one that has nothing to do."""
    peers = PeerMap()
    peers.renew("cat")
    holder, idle = (WorkerLoad(worker, 4, costs=costs(**prices), peers=peers) for worker in range(2))
    holder.templates["cat"] = "host"
    if tier:
        idle.templates["cat"] = tier
    for edit in range(queued):
        holder.add(str(edit), 10, 1000, holder.costs.dense.times(1000))
    return holder, idle


@pytest.mark.parametrize(
    ("tier", "peer", "expected"),
    [
        (None, 0.01, "peer"),
        (None, 5.0, None),  # registering is quicker
        ("remote", 5.0, "peer"),  # peers are asked before the remote tier
        ("disk", 0.01, "disk"),
        ("host", 0.01, "host"),
    ],
)
def test_where_a_worker_finds_a_template_that_a_peer_holds(
    tier: TierName | None, peer: float, expected: TierName | None
) -> None:
    _, idle = pair(tier=tier, peer=peer)
    assert idle.tier_of(WORK) == expected
    assert idle.has_to_register(WORK) == (expected is None)


def test_a_worker_that_could_not_copy_registers_until_there_is_another_holder() -> None:
    _, idle = pair()
    third = WorkerLoad(2, 4, costs=costs(), peers=idle.peers)
    idle.peers.fail("cat", idle.worker)
    assert (idle.tier_of(WORK), third.tier_of(WORK)) == (None, "peer")
    idle.peers.renew("cat")
    assert idle.tier_of(WORK) == "peer"
    idle.peers.drop("cat")
    idle.peers.fail("cat", idle.worker)
    assert (idle.tier_of(WORK), third.tier_of(WORK)) == (None, None)


def test_an_edit_goes_to_the_holder_or_where_the_template_is_copied_to_whichever_is_sooner() -> None:
    """A popular template is copied when the queue where it is takes longer than the copy."""
    assert [Router().choose(WORK, pair(queued, peer=0.01)) for queued in (0, 1, 8)] == [0, 1, 1]
    assert [Router().choose(WORK, pair(queued, peer=0.15)) for queued in (0, 1, 8)] == [0, 0, 1]
    assert Router().choose(WORK, pair(8, "remote", remote=50.0, peer=50.0)) == 0  # no copy pays
    _, idle = pair(8)
    saved = predicted_finish(WORK, pair(8, peer=5.0)[1]) - predicted_finish(WORK, idle)
    assert saved == pytest.approx(0.1 - 0.01, abs=0.01)  # dense computing of ten steps, less the copy
    idle.expect(WORK)
    assert idle.tier_of(WORK) == "host"
    assert idle.link.fetching == {(1, "cat"): pytest.approx(0.01)}


def test_measured_fetches_correct_what_is_typical() -> None:
    common = FetchRates()
    rates, others = FetchRates(common), FetchRates(common)
    assert rates.per_byte("peer", 1e-9) == 1e-9
    rates.measure("peer", 1000, 0.5)  # a small one says little
    assert rates.per_byte("peer", 1e-9) == pytest.approx(1e-9 + 2 * 0.5 / PRIOR_BYTES, rel=0.1)
    for _ in range(50):
        rates.measure("peer", 10**9, 10.0)
    assert rates.per_byte("peer", 1e-9) == pytest.approx(1e-8, rel=0.01)
    assert others.per_byte("peer", 1e-9) == pytest.approx(1e-8, rel=0.1)  # judged by the others
    assert rates.per_byte("remote", 1e-9) == 1e-9
    slow = replace(pair()[1], costs=costs(), fetch_rates=rates, templates={})
    assert slow.tier_of(WORK) == "peer"
    rates.measure("peer", 10**9, 1e6)
    assert slow.tier_of(WORK) is None  # by now, registering is quicker


def test_among_equals_the_holder_is_chosen() -> None:
    """Preparing takes longer than all else, on either worker. Nothing is moved or registered without need."""
    for tier, peer in ((None, 0.01), (None, 5.0), ("remote", 0.01)):
        holder, idle = pair(0, tier, peer=peer)  # type: ignore[arg-type]
        for load in (holder, idle):
            load.measure_side_stage("prepare", 100.0)
        assert [Router().choose(WORK, (idle, holder)) for _ in range(3)] == [holder.worker] * 3


def test_a_stride_makes_registering_and_copying_cheaper_alike() -> None:
    """A template that keeps every fifth step has a fifth of the bytes, and a registration computes a fifth of the
    steps."""
    _, every = pair(peer=0.1)
    fifth = WorkerLoad(1, 4, costs=msgspec.structs.replace(every.costs, stride=5), peers=every.peers)
    assert fifth.fetch_from("peer", WORK) == pytest.approx(every.fetch_from("peer", WORK) / 5)
    assert fifth.register_compute(WORK) == pytest.approx(every.register_compute(WORK) / 5)
    assert fifth.tier_of(WORK) == every.tier_of(WORK) == "peer"


def test_an_edit_without_a_template_is_placed_by_the_steps_that_it_computes_in_full() -> None:
    """Its own dense steps serve the others. So a worker where its template would have to be fetched first is worse."""
    holder, idle = pair(remote=0.05, tier="remote")
    holder.templates.clear()
    holder.peers.drop("cat")
    may_reuse = replace(WORK, must_reuse=False)
    for own_share, best in ((1.0, idle), (0.2, holder)):
        work = replace(may_reuse, own_share=own_share)
        seconds = {load.worker: predicted_finish(work, load) for load in (holder, idle)}
        assert min(seconds, key=seconds.__getitem__) == best.worker, seconds

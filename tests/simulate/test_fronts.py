"""A simulated cluster with several fronts: cases that can be worked out by hand, and what always holds."""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from instgenie.cost.table import StepCosts
from instgenie.simulate.clock import Clock
from instgenie.simulate.cluster import make_job
from instgenie.simulate.fronts import FrontedShape, FrontSeconds, Pushes, SharedLoad, simulate_fronts
from instgenie.simulate.network import Link, LinkShape, Network, NetworkedMemory
from instgenie.simulate.service import LinearService, SideSeconds
from instgenie.simulate.worker import SimulatedJob

SECOND = LinearService(per_step=1.0, per_token=0.0, side=SideSeconds(prepare=0.5, decode=0.25))
SHAPE = LinkShape(workers_per_node=2, node_rate=10.0, store_rate=20.0, store_seconds=1.0)


def jobs_at(*times: float, num_templates: int = 1) -> list[SimulatedJob]:
    return [make_job(index, at, 2, 100, 10, f"cat {index % num_templates}") for index, at in enumerate(times)]


def test_one_front_and_one_worker_are_the_plain_simulation() -> None:
    jobs = jobs_at(0.0, 0.5)
    busy = simulate_fronts(FrontedShape(1), SECOND, jobs)
    assert [job.finished for job in jobs] == [2.75, 3.75]
    assert (busy.hits, busy.num_bytes, busy.store) == (1.0, 0.0, 0.0)


def test_a_front_does_one_thing_at_a_time() -> None:
    """Two edits come at once, to two workers. Accepting takes .1 s, and so does answering; a step is read in .2 s. So
    the first, decoded at 2.85, waits until the front has read both last steps, at 2.6 and 2.7."""
    jobs = jobs_at(0.0, 0.0, num_templates=2)
    shape = FrontedShape(2, front=FrontSeconds(edit=0.2, step=0.1, job_step=0.1))
    simulate_fronts(shape, SECOND, jobs)
    assert [round(job.prepared, 3) for job in jobs] == [0.6, 0.7]
    assert jobs[0].finished == pytest.approx(3.1)
    two = jobs_at(0.0, 0.0, num_templates=2)
    simulate_fronts(FrontedShape(2, 2, front=shape.front), SECOND, two)
    assert [round(job.prepared, 3) for job in two] == [0.6, 0.6]


def test_a_front_knows_its_own_jobs_at_once_and_those_of_others_when_they_are_pushed() -> None:
    clock = Clock()
    load = SharedLoad(0, 8, pushes=Pushes(clock, 1.0, 0))
    load.owners = {"mine": 0, "yours": 1}
    price = load.costs.price(100, 100, None)
    clock.now = 0.5
    load.add("mine", 10, 100, price)
    load.add("yours", 4, 100, price)
    assert [load.seen_by(front, 0).num_steps for front in (0, 1, 2)] == [10, 4, 0]
    clock.now = 1.5
    assert [load.seen_by(front, 0).num_steps for front in (0, 1, 2)] == [14, 14, 14]
    load.step("mine")
    load.remove("yours")
    assert [load.seen_by(front, 0).num_steps for front in (0, 1, 2)] == [13, 10, 14]
    clock.now = 2.0
    assert [load.seen_by(front, 0).num_steps for front in (0, 1, 2)] == [9, 9, 9]


def test_a_template_comes_from_the_source_that_delivers_it_first() -> None:
    """Templates have 100 bytes: 10 s over the link of a node, of which the store needs 1 s more to begin."""
    network = Network(SHAPE, num_workers=6, template_bytes=100.0)
    memories = [NetworkedMemory(worker, 2, network) for worker in range(6)]
    assert memories[0].use("cat", 0.0) == 11.0  # from the store
    assert memories[0].use("cat", 1.0) == 11.0  # it is on its way
    assert memories[2].use("cat", 20.0) == 30.0  # from its peer
    assert memories[1].use("cat", 20.0) == pytest.approx(20.0, abs=1e-3)  # from the same node
    assert memories[4].use("cat", 20.0) in (31.0, 40.0)  # its peers may be busy: from the store, then
    assert (memories[0].num_hits, memories[0].num_fetches) == (1, 1)
    assert memories[0].get("cat") == "host"
    for template in ("dog", "cow"):
        memories[0].use(template, 50.0)
    assert memories[0].get("cat") == "remote"  # evicted
    assert 0 not in network.holders["cat"]


def test_transfers_over_one_link_take_turns() -> None:
    network = Network(LinkShape(1, 10.0, 1000.0, 0.0, has_peers=False), num_workers=2, template_bytes=100.0)
    assert [network.fetch(name, 0, 0.0) for name in ("cat", "dog")] == [10.0, 20.0]
    assert network.fetch("cat", 1, 0.0) == pytest.approx(10.2)  # the store has sent the two by then
    link = Link(10.0, num_bytes=50.0)
    assert link.use(10.0) == 0.5


@pytest.mark.parametrize("num_fronts", [1, 3])
@pytest.mark.parametrize("staleness", [0.0, 2.0])
def test_every_job_is_done_once_and_every_load_returns_to_nothing(num_fronts: int, staleness: float) -> None:
    jobs = jobs_at(*(0.1 * index for index in range(60)), num_templates=5)
    busy = simulate_fronts(FrontedShape(4, num_fronts, staleness, max_templates=2), SECOND, jobs)
    assert [job.num_finished for job in jobs] == [1] * 60
    assert {job.worker for job in jobs} == {0, 1, 2, 3}
    assert {job.front for job in jobs} == set(range(num_fronts))
    assert 0 <= busy.hits <= 1


def test_a_stride_leaves_fewer_bytes_to_move() -> None:
    """A template of 2 steps and 100 tokens, at 1 byte a token and kept step: 200 bytes, or 100 with a stride of 2."""

    @dataclass(frozen=True)
    class Kept(LinearService):
        stride: int = 1

        def costs(self, num_tokens: int) -> StepCosts:
            return replace(super().costs(num_tokens), bytes_per_token=1.0, stride=self.stride)

    shape = FrontedShape(2, max_templates=1, network=SHAPE)
    for stride, expected in ((1, 200.0), (2, 100.0), (3, 100.0)):
        jobs = jobs_at(0.0, 100.0, 200.0, num_templates=3)
        busy = simulate_fronts(shape, Kept(per_step=1.0, per_token=0.0, stride=stride), jobs)
        assert busy.num_bytes == pytest.approx(expected / 3)  # the third template is fetched; the others were there

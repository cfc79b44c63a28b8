"""Router, admission and simulator know what ControlNets add to a step, where they are, and what loading them takes."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from instgenie.cost.table import ControlPrice, Guided, StepCosts
from instgenie.scheduling.router import Router, Work, WorkerLoad, predicted_finish
from instgenie.simulate.cluster import ClusterShape, simulate
from instgenie.simulate.service import LinearService
from instgenie.simulate.worker import SimulatedJob

MB = 10**6
EDGES, POSE = ("edges", 300 * MB), ("pose", 100 * MB)
PRICES = {"edges": ControlPrice(0.0004), "pose": ControlPrice(0.0002)}  # per token, as the costs of this service are
PLAIN = Work(20, 100, 20)
GUIDED = replace(PLAIN, controls=(EDGES, POSE), guided=(Guided("edges"), Guided("pose", 0.5)))
PER_STEP = 100 * (0.0004 + 0.5 * 0.0002)  # seconds that they add to each step


class ControlledService(LinearService):
    def costs(self, num_tokens: int) -> StepCosts:
        return replace_struct(super().costs(num_tokens), controls=PRICES)


SERVICE = ControlledService(0.01, 1e-5)


def load(worker: int = 0) -> WorkerLoad:
    return WorkerLoad(worker, 8, costs=SERVICE.costs(100))


def test_an_edit_pays_for_every_step_that_is_guided() -> None:
    one = load()
    one.controls.hold(["edges", "pose"])
    assert one.price_of(GUIDED).compute - one.price_of(PLAIN).compute == pytest.approx(PER_STEP)
    added = predicted_finish(GUIDED, one) - predicted_finish(PLAIN, one)
    assert added == pytest.approx(20 * PER_STEP, rel=1e-3)


def test_an_edit_goes_where_its_controlnets_are() -> None:
    loads = [load(worker) for worker in range(3)]
    loads[1].controls.hold(["edges"])
    loads[2].controls.hold(["edges", "pose"])
    finishes = [predicted_finish(GUIDED, one) for one in loads]
    assert finishes[0] - finishes[2] == pytest.approx(0.4)  # 400 MB at 1 GB/s, which nothing hides
    assert finishes[1] - finishes[2] == pytest.approx(0.1)
    assert Router().choose(GUIDED, loads) == 2
    loads[2].add("busy", 400, 100, loads[2].price_of(PLAIN))
    assert Router().choose(GUIDED, loads) == 1
    loads[0].expect(GUIDED)
    assert Router().choose(GUIDED, loads) == 0


def test_measured_loads_count() -> None:
    one = load()
    for _ in range(50):
        one.controls.measure(300 * MB, 3.0)
    assert one.controls.load_seconds([EDGES]) == pytest.approx(3.0, rel=0.1)


def simulated(*works: Work) -> list[float]:
    """Latencies of edits that arrive far from each other."""
    jobs = [SimulatedJob(str(number), 100.0 * number, work, is_cached=False) for number, work in enumerate(works)]
    shape = ClusterShape(num_workers=1, reuse=False)
    return [job.latency for job in simulate(shape, SERVICE, jobs)]


def test_the_simulator_takes_what_the_router_predicts() -> None:
    plain, first, second = simulated(PLAIN, GUIDED, GUIDED)
    assert second - plain == pytest.approx(20 * PER_STEP)
    assert first - second == pytest.approx(0.4)  # the second one finds them loaded

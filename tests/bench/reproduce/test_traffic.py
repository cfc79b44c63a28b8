"""The load that the report puts on a cluster, and the model that it fits for the simulator."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from instgenie.bench.pictures import draw_mask
from instgenie.bench.reproduce import serving
from instgenie.bench.reproduce.serving import Run, Served, Session, Step, Watch
from instgenie.bench.reproduce.traffic import fit_line, side_seconds
from instgenie.bench.workload import Arrival
from instgenie.cluster.cluster import Cluster
from instgenie.cluster.config import ClusterConfig
from instgenie.cluster.orders import Facts, Finished, Order
from instgenie.types import PixelMask

ARRIVAL = Arrival(at=0.0, template=0, mask_ratio=0.1, mask_shape="box", size=(16, 16), steps=2, seed=0)
FACTS = Facts(
    seed=0,
    width=16,
    height=16,
    num_tokens=100,
    num_masked_tokens=10,
    num_computed_tokens=10,
    cache_tier="host",
    worker=0,
    num_attempts=1,
    queue_seconds=0.0,
    prepare_seconds=0.1,
    denoise_seconds=1.0,
    dense_seconds=2.0,
    finish_seconds=0.5,
    finish_thread_seconds=0.1,
)


class Answered:
    async def events(self) -> AsyncIterator[Finished]:
        yield Finished(b"", FACTS)


@dataclass
class FakeCluster:
    """A cluster that answers at once and records the times of the requests."""

    asked: list[float] = field(default_factory=list)

    def submit(self, orders: list[Order]) -> list[Answered]:
        self.asked.append(time.perf_counter())
        return [Answered() for _ in orders]


def test_edits_are_sent_when_they_arrive_however_long_their_masks_take_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_slowly(*given: Any) -> PixelMask:
        time.sleep(0.2)
        return draw_mask(*given)

    monkeypatch.setattr(serving, "mask_of", draw_slowly)
    cluster = FakeCluster()
    arrivals = [replace(ARRIVAL, at=at) for at in (0.0, 0.3)]
    asyncio.run(Session(cast(Cluster, cluster), Watch()).run(arrivals))
    first, second = cluster.asked
    assert second - first > 0.1


def test_finishing_is_learnt_as_a_line_over_masked_tokens() -> None:
    """Threads take the last tenth of a second."""
    facts = [replace(FACTS, num_masked_tokens=num, finish_seconds=0.2 + 0.01 * num + 0.1) for num in (10, 20, 60)]
    steps = [Step(0, 1.0, between, ()) for between in (0.0, 0.02)]
    run = Run(ClusterConfig(), 1.0, [Served(ARRIVAL, 1.0, one) for one in facts], steps, [], [])
    side = side_seconds(run)
    assert side.between == pytest.approx(0.01)
    assert (side.decode, side.decode_token) == pytest.approx((0.2, 0.01))
    assert (side.prepare, side.finish_thread) == pytest.approx((0.1, 0.1))
    assert side.finish_seconds(30) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("xs", "ys", "start", "slope"),
    [
        ((1, 2, 3), (1.0, 3.0, 2.0), 1.0, 0.5),
        ((1, 2, 3), (3.0, 2.0, 1.0), 2.0, 0.0),  # would fall
        ((1, 2, 3), (0.0, 1.0, 5.0), 0.0, 1.0),  # would begin below 0
        ((2, 2, 2), (1.0, 2.0, 3.0), 2.0, 0.0),
    ],
)
def test_a_line_goes_through_the_means_and_is_never_negative(
    xs: list[int], ys: list[float], start: float, slope: float
) -> None:
    assert fit_line(xs, ys) == pytest.approx((start, slope))

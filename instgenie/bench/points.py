"""Shares of edits in time, by policy and load: what they add up to in words and charts. Knows neither servers nor the
simulator."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from instgenie.bench.plots import Axis, Chart, Series
from instgenie.bench.reproduce.axes import at_values, doubling

BASELINE = "fcfs"
BOUND = "any order (bound)"
LOW_LOAD, GOAL, START = 0.3, 0.99, 0.7


@dataclass(frozen=True)
class DeadlinePoint:
    workload: str
    workers: int
    load: float
    policy: str
    rate: float  # edits per second
    attainment: float
    mean_s: float | None = None
    num_preemptions: int = 0


def line_of(what: str, points: Iterable[DeadlinePoint]) -> str:
    cells = [
        f"{point.policy} {point.attainment:.1%}" + (f" ({point.mean_s:.2f} s)" if point.mean_s else "")
        for point in points
    ]
    return f"{what}: {', '.join(cells)}"


def summary(points: Sequence[DeadlinePoint]) -> list[str]:
    """What the policies reach where first come, first served reaches 70 %, and the rates at which they reach 99 %."""
    curves = {name: curve(points, name) for name in dict.fromkeys(point.policy for point in points)}
    said = []
    if BASELINE in curves and (start := crossing(curves[BASELINE], START)):
        reached = ", ".join(f"{name} {value_at(line, start):.1%}" for name, line in curves.items())
        said.append(f"where {BASELINE} reaches {START:.0%} (load {start:.1%}): {reached}")
    loads = {name: crossing(line, GOAL) for name, line in curves.items()}
    if first := loads.get(BASELINE):
        said_of = {name: f"{one / first:.2f}x" if one else "at no or every rate" for name, one in loads.items()}
        rates = ", ".join(f"{name} {one}" for name, one in said_of.items())
        said.append(f"rate at {GOAL:.0%} in time, of that of {BASELINE}: {rates}")
    means = {point.policy: point.mean_s for point in points if point.load <= LOW_LOAD and point.mean_s}
    if base := means.get(BASELINE):
        slower = ", ".join(f"{name} {mean / base - 1:+.1%}" for name, mean in means.items())
        said.append(f"mean latency at low load, against {BASELINE}: {slower}")
    return said


def curve(points: Iterable[DeadlinePoint], policy: str) -> list[tuple[float, float]]:
    return sorted((point.load, point.attainment) for point in points if point.policy == policy)


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The load at which a falling curve reaches a level; None if it does not."""
    for (low, value), (high, next_value) in pairwise(curve):
        if value >= level > next_value:
            return low + (value - level) / (value - next_value) * (high - low)
    return None


def value_at(curve: Sequence[tuple[float, float]], load: float) -> float:
    for (low, value), (high, next_value) in pairwise(curve):
        if low <= load <= high:
            return value + (load - low) / (high - low) * (next_value - value)
    return curve[-1][1]


SHARE = Axis("share of edits in time", (0, 0.2, 0.4, 0.6, 0.8, 1), 0, 1.02, form="{:.0%}")


def charts(model: str, points: Sequence[DeadlinePoint]) -> dict[str, Chart]:
    name_of_model = model.removeprefix("dummy:")
    drawn = {}
    swept = [point for point in points if point.workload != "neighbour"]
    for workload, num in dict.fromkeys((point.workload, point.workers) for point in swept):
        own = [point for point in swept if (point.workload, point.workers) == (workload, num)]
        if len({point.load for point in own}) > 1:
            title = f"Edits in time against load: {name_of_model}, {workload}, {num:,} worker{'s' if num > 1 else ''}"
            drawn[f"deadlines-{workload}-{num}"] = chart(title, "load, as a share of full batches", own, by_load)
    for workload, load_share in dict.fromkeys((point.workload, point.load) for point in swept):
        own = [point for point in swept if (point.workload, point.load) == (workload, load_share)]
        if len({point.workers for point in own}) > 2:
            title = f"Edits in time against workers: {name_of_model}, {workload}, load {load_share:.0%}"
            drawn[f"deadlines-{workload}-workers"] = chart(title, "workers", own, by_workers)
    if beside := [point for point in points if point.workload == "neighbour"]:
        title = f"Edits in time of a quiet tenant (load 20 %) beside a noisy one: {name_of_model}"
        drawn["deadlines-neighbour"] = chart(title, "load of the noisy tenant", beside, by_load)
    return drawn


def rate_chart(title: str, points: Sequence[DeadlinePoint]) -> Chart:
    axis = at_values("edits per second", [round(point.rate, 2) for point in points])
    return Chart(title, axis, SHARE, series_of(points, by_rate))


def by_rate(point: DeadlinePoint) -> float:
    return point.rate


def by_load(point: DeadlinePoint) -> float:
    return point.load


def by_workers(point: DeadlinePoint) -> float:
    return point.workers


def chart(title: str, name: str, points: Sequence[DeadlinePoint], place: Callable[[DeadlinePoint], float]) -> Chart:
    values = sorted({place(point) for point in points})
    axis = doubling(name, values) if place is by_workers else replace(doubling(name, values), log=False, form="{:.0%}")
    return Chart(title, axis, SHARE, series_of(points, place))


def series_of(points: Sequence[DeadlinePoint], place: Callable[[DeadlinePoint], float]) -> list[Series]:
    return [
        Series(policy, sorted((place(point), point.attainment) for point in points if point.policy == policy))
        for policy in dict.fromkeys(point.policy for point in points)
    ]

"""Axes that fit the values drawn along them."""

import math
from collections.abc import Iterable

from instgenie.bench.plots import Axis
from instgenie.bench.scatter import ticks


def linear(name: str, values: Iterable[float]) -> Axis:
    most = 1.08 * max([value for value in values if math.isfinite(value)], default=1.0) or 1.0
    return Axis(name, ticks(most), 0, most)


def at_values(name: str, values: Iterable[float]) -> Axis:
    """Put a tick at each value."""
    known = sorted(set(values))
    margin = 0.06 * (known[-1] - known[0] or 1)
    return Axis(name, known, known[0] - margin, known[-1] + margin)


def doubling(name: str, values: Iterable[float]) -> Axis:
    """Make a logarithmic axis with a tick at each value."""
    known = sorted(set(values))
    return Axis(name, known, known[0] / 1.15, known[-1] * 1.15, log=True)


def decades(name: str, values: Iterable[float]) -> Axis:
    """Make a logarithmic axis between two round numbers."""
    known = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = (10.0 ** math.floor(math.log10(min(known))), 10.0 ** math.ceil(math.log10(max(known) * 1.001)))
    marks = [power * part for power in powers(low, high) for part in (1, 2, 5)]
    below = max((mark for mark in marks if mark <= min(known)), default=low)
    above = min((mark for mark in marks if mark >= max(known)), default=high)
    return Axis(name, [mark for mark in marks if below <= mark <= above], below, max(above, 1.01 * below), log=True)


def powers(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]

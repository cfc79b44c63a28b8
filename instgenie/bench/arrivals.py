"""Arrival times of edits: random at a given rate, or read from a file. Knows seconds and no edits."""

import csv
import json
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from instgenie.errors import WorkloadError

TIMESTAMP = "gmt_create"  # column of a table of requests
Times = NDArray[np.float64]  # [edits], seconds after the first, ascending


def poisson(num: int, rate: float, generator: np.random.Generator) -> Times:
    """Draw independent arrivals; at an infinite rate all edits arrive at once."""
    gaps = generator.exponential(1 / rate, num)
    times: Times = np.cumsum(gaps) - gaps[0]
    return times


def replayed(source: str, num: int, rate: float) -> Times:
    """Return the first times of a file, scaled to a finite mean rate if one is given, so that bursts stay bursts."""
    times = read_times(source)
    if num > len(times):
        raise WorkloadError(f"{source} has {len(times)} arrivals: at least {num} are expected")
    times = times[:num]
    if math.isfinite(rate) and times[-1] > 0:
        times = times * ((num - 1) / rate / times[-1])
    return times


def read_times(source: str) -> Times:
    """Read one of these formats: a JSON list of seconds; one line per arrival with its seconds; one line per arrival
    with its milliseconds and its number, as in `298.0,2634`; a CSV table with a column `gmt_create` of dates."""
    try:
        text = Path(source).read_text()
        times: Times = np.array(sorted(parse_times(text)))
    except (OSError, ValueError, TypeError, KeyError):
        raise WorkloadError(f"{source} is not a file of arrival times") from None
    if not len(times) or not np.isfinite(times).all():
        raise WorkloadError(f"{source} has no arrival times, or some that are not numbers")
    times -= times[0]
    return times


def parse_times(text: str) -> Sequence[float]:
    if text.lstrip().startswith("["):
        return [float(value) for value in json.loads(text)]
    rows = list(csv.reader(text.splitlines()))
    if rows and TIMESTAMP in rows[0]:
        column = rows[0].index(TIMESTAMP)
        return [datetime.fromisoformat(row[column]).timestamp() for row in rows[1:]]
    unit = 1e-3 if rows and len(rows[0]) == 2 else 1.0
    return [unit * float(row[0]) for row in rows if row]

"""When edits arrive: at random at a rate, or as a file of times has it. Knows seconds; knows no edit."""

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
Times = NDArray[np.float64]  # [edits], seconds after the first, in order


def poisson(num: int, rate: float, generator: np.random.Generator) -> Times:
    """Edits that know nothing of each other; an infinite rate is all at once."""
    gaps = generator.exponential(1 / rate, num)
    times: Times = np.cumsum(gaps) - gaps[0]
    return times


def replayed(source: str, num: int, rate: float) -> Times:
    """The first times of a file. A finite rate stretches or shrinks them until it is their mean: bursts stay bursts."""
    times = read_times(source)
    if num > len(times):
        raise WorkloadError(f"{source} has {len(times)} arrivals: at least {num} are expected")
    times = times[:num]
    if math.isfinite(rate) and times[-1] > 0:
        times = times * ((num - 1) / rate / times[-1])
    return times


def read_times(source: str) -> Times:
    """Of one of these: a JSON list of seconds; a line for each arrival with its seconds; a line for each arrival with
    its milliseconds and its number, `298.0,2634`; a table with a column `gmt_create` of dates."""
    try:
        text = Path(source).read_text()
        times: Times = np.array(sorted(parse_times(text)))
    except (OSError, ValueError, TypeError, KeyError):
        raise WorkloadError(f"{source} is no file of arrival times") from None
    if not len(times) or not np.isfinite(times).all():
        raise WorkloadError(f"{source} has no arrival times, or some that are no numbers")
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

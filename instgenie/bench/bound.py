"""The largest share of edits that any order can finish in time, with all arrivals known in advance.

The machine is taken to be one that divides its time at will and always works at the pace of a full batch, so no real
schedule meets more deadlines. Then the seconds that edits get inside their windows form a polymatroid, and serving
those with the least work first meets the most, counting parts of edits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

REACH = 300  # edits before and after one whose windows are checked with its own; fewer checks only raise the bound
MAX_EDITS = 4000  # the bound of a longer workload is that of its beginning


class Window(NamedTuple):
    opens: float
    closes: float
    work: float  # seconds


def most_in_time(windows: Sequence[Window]) -> float:
    """Return the share, from 0 to 1. Windows are in the order in which they open."""
    windows = windows[:MAX_EDITS]
    opens, closes, work = (np.array(column, dtype=float) for column in zip(*windows, strict=True))
    by_close = np.argsort(closes, kind="stable")
    places = np.argsort(by_close, kind="stable")  # of each window among the closing times
    free = closes[by_close][None, :] - opens[:, None]  # seconds between each opening and each closing
    free[free <= 0] = np.inf
    num_served = 0.0
    for one in np.argsort(work, kind="stable"):
        around = free[max(one - REACH, 0) : one + 1, places[one] : places[one] + REACH]
        given = min(work[one], max(float(around.min()), 0.0))
        around -= given
        num_served += given / work[one]
    return num_served / len(windows)

"""Corrects a table of step costs by measured steps. Knows numbers only.

A table that was not calibrated on its device may be wrong about what a step is made of, and then no factor makes it
right: a batch looks too cheap or too dear. So a pass, a job and a second of predicted computing each get a coefficient,
by least squares of the relative errors, in which old steps fade out and the table itself counts as one step:

    seconds = per_pass * passes + per_job * jobs + scale * computing

The corrected table is in the seconds of the given one, as they were when it was first corrected. The factor from these
to measured seconds is the pace of the worker (`scheduling/pace.py`), so that workers whose tables are corrected and
others whose tables are not can be compared.
"""

import statistics
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from instgenie.cost.table import Price, StepCosts

DECAY = 0.995  # weight of a measured step after one more
NUM_FIRST, NUM_BETWEEN = 8, 16  # steps until the table is corrected for the first time, and then again


class LearntCosts:
    def __init__(self, table: StepCosts) -> None:
        self.table = self.costs = table  # as given, and as corrected
        self._num_measured = 0
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)  # of the terms of a step, relative to its seconds
        self._ratios: list[float] = []  # of the first steps: measured to predicted seconds

    def measure(self, prices: Sequence[Price], seconds: float) -> bool:
        """Note a step of jobs at these prices of the given table. Return whether the costs have changed."""
        compute, load = sum(price.compute for price in prices), sum(price.load for price in prices)
        predicted = self.table.step_seconds(prices)
        if load >= predicted or seconds <= 0:  # a step that waits for loads says nothing about computing
            return False
        num_passes = 1 + self.table.num_more_passes(prices)
        terms = np.array((num_passes, len(prices), compute)) / seconds
        self._products = DECAY * self._products + np.outer(terms, terms)
        self._sums = DECAY * self._sums + terms
        self._num_measured += 1
        if self._num_measured <= NUM_FIRST:
            self._ratios.append(seconds / predicted)
        is_due = self._num_measured == NUM_FIRST or not self._num_measured % NUM_BETWEEN
        if is_due:
            self.costs = self._corrected()
        return is_due

    def _corrected(self) -> StepCosts:
        table = self.table
        ratio = statistics.median(self._ratios)  # one slow step does not count
        known = np.array((table.per_step, 0.0, 1.0))
        least = max(table.per_step, table.dense.compute)
        trust = 1 / np.array((least, least, 1.0)) ** 2
        per_pass, per_job, scale = solve(ratio**2 * self._products + np.diag(trust), ratio * self._sums + trust * known)
        return replace(
            table,
            ratio=ratio,
            per_step=per_pass,
            per_pass=per_pass if table.per_pass else 0.0,
            per_job=per_job,
            gpu=tuple(scaled(price, scale) for price in table.gpu),
            host=tuple(scaled(price, scale) for price in table.host),
            dense=scaled(table.dense, scale),
            controls={version: one._replace(seconds=scale * one.seconds) for version, one in table.controls.items()},
        )


def scaled(price: Price, scale: float) -> Price:
    """The price with other seconds of computing; loads are as long as before."""
    return price._replace(compute=scale * price.compute)


def solve(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Solve for coefficients of at least 0: the most negative one is left out until there is none."""
    used = list(range(len(target)))
    found = np.zeros(len(target))
    while used:
        values = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
        if (values >= 0).all():
            found[used] = values
            break
        del used[int(values.argmin())]
    return [float(one) for one in found]

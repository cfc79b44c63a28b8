"""Predicts when an edit will be done: what the worker's cost model says, corrected by how edits went so far."""

from instgenie.scheduling.router import Work, WorkerLoad, predicted_finish

DECAY = 0.9  # weight of a finished edit after one more
LIMITS = (0.2, 5.0)  # of the correction: one edit that waited for something else does not spoil all predictions


class Predictor:
    """The correction is the ratio of the seconds that recent edits took to those that were predicted for them. It
    starts from one invented edit that took as long as predicted."""

    def __init__(self) -> None:
        self._predicted = self._taken = 1.0
        self.error = 0.0  # mean relative error of recent predictions

    @property
    def correction(self) -> float:
        low, high = LIMITS
        return min(max(self._taken / self._predicted, low), high)

    def predict(self, work: Work, load: WorkerLoad) -> float:
        """Seconds until the work is done on a worker that has this load to do before or beside it."""
        return self.correction * (predicted_finish(work, load) + sum(load.side_seconds.values()))

    def learn(self, predicted: float, seconds: float) -> None:
        """Note how long an edit took. `predicted` is what was said, with the correction of that time."""
        raw = predicted / self.correction
        self._predicted = DECAY * self._predicted + raw
        self._taken = DECAY * self._taken + seconds
        self.error = DECAY * self.error + (1 - DECAY) * abs(predicted - seconds) / max(seconds, 1e-6)

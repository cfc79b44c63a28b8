"""The pace of a worker: its predicted step times, corrected by measured ones."""

PRIOR_SECONDS = 0.1  # length of the invented step that the fit starts with
DECAY = 0.98  # weight of a measured step after one more
NUM_KNOWN = 50  # steps after which a worker is judged by its own pace


class Pace:
    """Measured seconds of a step as a linear function of the predicted seconds. It is a least-squares fit in which old
    steps fade out and which starts from two invented steps that took as long as predicted.

    The workers of a cluster share a common pace. A worker that has taken few steps is judged by it; otherwise the
    worker would look faster or slower than the others and get all edits or none.
    """

    def __init__(self, common: "Pace | None" = None) -> None:
        self.common = common
        self.restart()

    def restart(self, ratio: float = 1.0) -> None:
        """Forget all measured steps: predictions are made in another way from now on. `ratio` are the seconds that a
        predicted second is known to take."""
        self._num_measured = -2
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for seconds in (0.0, PRIOR_SECONDS):
            self._fit(seconds, ratio * seconds)

    @property
    def is_measured(self) -> bool:
        return self._num_measured > 0 or (self.common is not None and self.common.is_measured)

    def measure(self, predicted: float, seconds: float) -> None:
        self._fit(predicted, seconds)
        if self.common:
            self.common.measure(predicted, seconds)

    def _fit(self, predicted: float, seconds: float) -> None:
        self._num_measured += 1
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + predicted
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + predicted * predicted
        self._xy = DECAY * self._xy + predicted * seconds
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        mean = self._y / self._weight
        # neither more work nor more steps save time, whatever noise in the measurements says
        self.per_second = min(max(slope, 0.0), mean * self._weight / self._x if self._x else 0.0)
        self.per_step = max(mean - self.per_second * self._x / self._weight, 0.0)

    def seconds(self, num_steps: float, predicted: float) -> float:
        """Expected seconds of `num_steps` steps that were predicted to take `predicted` seconds together."""
        if self.common and self._num_measured < NUM_KNOWN:
            return self.common.seconds(num_steps, predicted)
        return num_steps * self.per_step + predicted * self.per_second

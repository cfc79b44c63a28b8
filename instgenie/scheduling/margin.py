"""The seconds between the last step of an edit and its answer, as a worker's edits have taken them lately."""

from collections import deque

NUM_SEEN = 64
SHARE = 0.9  # of the edits take no longer than the margin


class Margin:
    """An edit is in time if its last step is taken so long before its deadline: it is then sent to the finish process,
    waits there for others, is decoded and encoded. An average would be too short for half of them."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=NUM_SEEN)
        self.seconds = 0.0

    def measure(self, seconds: float) -> None:
        self._seen.append(seconds)
        self.seconds = sorted(self._seen)[int(SHARE * (len(self._seen) - 1))]

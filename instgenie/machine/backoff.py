"""Requests to a server that may be slow or away: each has a time limit, and after a failure the server is left alone
for a while, longer with each failure in a row. Knows no protocol."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

SLOWEST = 10e6  # bytes per second; a slower server counts as gone
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds for which a server that failed is left alone

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class GoneError(Exception):
    """The server cannot be asked at present."""


class Backoff:
    """`patience` is the time in seconds that a request without data may take."""

    def __init__(self, url: str, patience: float) -> None:
        self.url = url
        self.patience = patience
        self.pause, self.silent_until = FIRST_PAUSE, 0.0
        self._lock = threading.Lock()

    @property
    def is_silent(self) -> bool:
        """True while the server is left alone."""
        return time.monotonic() < self.silent_until

    def ask(self, work: Callable[[], Answer], num_bytes: int = 0) -> Answer:
        """The answer of a request that moves `num_bytes`. A FileNotFoundError is an answer. Any other error, or none in
        time, raises a GoneError and begins a pause: each protocol has errors of its own, and none may reach an edit."""
        if self.is_silent:
            raise GoneError(f"{self.url} does not answer")
        try:
            answer = within(self.patience + num_bytes / SLOWEST, work)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self.failed(error) from None
        self.pause = FIRST_PAUSE
        return answer

    def failed(self, error: Exception) -> GoneError:
        """Begin a pause, and return the error to raise."""
        with self._lock:
            pause, self.pause = self.pause, min(2 * self.pause, LAST_PAUSE)
            self.silent_until = time.monotonic() + pause
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s is left alone for %g seconds: %s", self.url, pause, reason)
        return GoneError(reason)


def within(seconds: float, work: Callable[[], Answer]) -> Answer:
    """The result of the work, or a TimeoutError. Work that takes longer goes on in a daemon thread, and its result is
    dropped."""
    answers: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.1f} seconds") from None
    if error:
        raise error
    return answer  # type: ignore[return-value]

"""The finish process of a worker: latents become encoded pictures, final ones and those on the way. Takes no step.

A device decodes one picture after the other. Threads composite and encode them meanwhile, for that takes a processor
longer than decoding takes a device; pictures leave in the order in which they came. Where there is no device but the
processor, each is decoded and encoded before the next.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from instgenie.cluster.config import NUM_ENCODERS, ProcessConfig
from instgenie.cluster.wire import Finish, Frame, JobFailed, Painted, Stop, read_mask, read_picture
from instgenie.engine.finish import decode
from instgenie.models.family import PartKind
from instgenie.models.model import Model
from instgenie.pictures.picture import composite, encode_picture
from instgenie.telemetry import traces
from instgenie.workers.frames import read_tensor
from instgenie.workers.process import Line, failure, run_process

PARTS: frozenset[PartKind] = frozenset({"vae"})

Encode = Callable[[], tuple[bytes, float]]  # the encoded picture, and the seconds that took


class Finisher:
    """Finishes a picture before it takes the next."""

    def __init__(self, model: Model, line: Line) -> None:
        self.model = model
        self.line = line

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        try:
            encoded, _ = self.decode(message, frames)()
        except Exception as error:
            self.line.send(failure(message.id, message.attempt, error))
        else:
            self.send(message, encoded, time.perf_counter() - start)

    def decode(self, message: Finish, frames: list[Frame]) -> Encode:
        """Tells what is left to do, for any thread."""
        latents = read_tensor(message.latents, frames[0]).to(self.model.device)
        [decoded] = decode([latents], [read_mask(frames[2], message.size)], message.grid, self.model)
        return partial(encode, message, frames, decoded)

    def send(self, message: Finish, encoded: bytes, seconds: float, thread_seconds: float = 0.0) -> None:
        self.line.send(Painted(message.id, message.attempt, message.partial, seconds, thread_seconds), [encoded])
        spent = seconds + thread_seconds
        traces.record(message.trace, "finish", spent, attempt=message.attempt, partial=message.partial)

    def send_done(self) -> None:
        """What was handled and is done; here it is sent already."""

    def close(self) -> None:
        """What is left is waited for, and sent; here nothing is."""


@dataclass(frozen=True, eq=False)
class Painting:
    """A picture that threads are at, or what became of it before."""

    message: Finish
    seconds: float  # of decoding
    encoded: Future[tuple[bytes, float]] | JobFailed

    @property
    def is_done(self) -> bool:
        return isinstance(self.encoded, JobFailed) or self.encoded.done()


class Painter(Finisher):
    """Decodes a picture while threads encode those before it."""

    def __init__(self, model: Model, line: Line) -> None:
        super().__init__(model, line)
        self.pool = ThreadPoolExecutor(NUM_ENCODERS, "encode")
        self.paintings: deque[Painting] = deque()

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        encoded: Future[tuple[bytes, float]] | JobFailed
        try:
            encoded = self.pool.submit(self.decode(message, frames))
            encoded.add_done_callback(lambda _: self.line.wake())
        except Exception as error:
            encoded = failure(message.id, message.attempt, error)
        self.paintings.append(Painting(message, time.perf_counter() - start, encoded))

    def send_done(self) -> None:
        """Up to the first that is not."""
        while self.paintings and self.paintings[0].is_done:
            self.send_first()

    def send_first(self) -> None:
        painting = self.paintings.popleft()
        message, encoded = painting.message, painting.encoded
        if isinstance(encoded, JobFailed):
            self.line.send(encoded)
        elif error := encoded.exception():
            self.line.send(failure(message.id, message.attempt, error))
        else:
            picture, thread_seconds = encoded.result()
            self.send(message, picture, painting.seconds, thread_seconds)

    def close(self) -> None:
        while self.paintings:
            self.send_first()
        self.pool.shutdown()


def encode(message: Finish, frames: list[Frame], decoded: NDArray[np.uint8]) -> tuple[bytes, float]:
    start = time.perf_counter()
    picture, mask = read_picture(frames[1], message.size), read_mask(frames[2], message.size)
    edited = composite(picture, decoded, mask, message.feather)
    encoded = encode_picture(edited, message.output_format, message.output_compression, is_quick=True)
    return encoded, time.perf_counter() - start


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    go_on(Painter(model, line) if model.device.type == "cuda" else Finisher(model, line))


def go_on(finisher: Finisher) -> None:
    """Until it is told to stop."""
    while True:
        match finisher.line.receive(wait=True):
            case Finish() as message, frames:
                finisher.handle(message, frames)
            case Stop(), _:
                finisher.close()
                return
        finisher.send_done()


if __name__ == "__main__":
    run_process(serve, PARTS)

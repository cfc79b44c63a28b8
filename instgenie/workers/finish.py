"""The finish process of a worker: latents become encoded pictures, final ones and those on the way. Takes no step.

The device decodes one picture after the other. Threads composite and encode them meanwhile, for that takes a processor
longer than decoding takes a device; pictures leave in the order in which they came.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from instgenie import traces
from instgenie.config import ProcessConfig
from instgenie.engine.finish import decode
from instgenie.engine.frames import read_tensor
from instgenie.models.model import Model
from instgenie.picture import composite, encode_picture
from instgenie.wire import Finish, Frame, Painted, Stop, read_mask, read_picture
from instgenie.workers.process import Line, failure, run_process

PARTS = frozenset({"vae"})
NUM_THREADS = 4

Encode = Callable[[], tuple[bytes, float]]  # the encoded picture, and the seconds that took


@dataclass(frozen=True, eq=False)
class Painting:
    """A picture that threads are at."""

    message: Finish
    seconds: float  # of decoding
    encoded: Future[tuple[bytes, float]]


class Finisher:
    def __init__(self, model: Model, line: Line) -> None:
        self.model = model
        self.line = line

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        """All of it at once."""
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


def encode(message: Finish, frames: list[Frame], decoded: NDArray[np.uint8]) -> tuple[bytes, float]:
    start = time.perf_counter()
    picture, mask = read_picture(frames[1], message.size), read_mask(frames[2], message.size)
    edited = composite(picture, decoded, mask, message.feather)
    encoded = encode_picture(edited, message.output_format, message.output_compression, is_quick=True)
    return encoded, time.perf_counter() - start


class Pipeline:
    """A finisher that decodes while threads encode."""

    def __init__(self, finisher: Finisher, pool: ThreadPoolExecutor) -> None:
        self.finisher, self.line, self.pool = finisher, finisher.line, pool
        self.paintings: deque[Painting] = deque()

    def take(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        try:
            encoded = self.pool.submit(self.finisher.decode(message, frames))
        except Exception as error:
            encoded = Future()
            encoded.set_exception(error)
        self.paintings.append(Painting(message, time.perf_counter() - start, encoded))
        encoded.add_done_callback(lambda _: self.line.wake())

    def send(self, wait: bool = False) -> None:
        """What is encoded, up to the first that is not; or everything."""
        while self.paintings and (wait or self.paintings[0].encoded.done()):
            painting = self.paintings.popleft()
            message = painting.message
            try:
                encoded, thread_seconds = painting.encoded.result()
            except Exception as error:
                self.line.send(failure(message.id, message.attempt, error))
            else:
                self.finisher.send(message, encoded, painting.seconds, thread_seconds)


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    with ThreadPoolExecutor(NUM_THREADS, "encode") as pool:
        pipeline = Pipeline(Finisher(model, line), pool)
        while True:
            match line.receive(wait=True):
                case Finish() as message, frames:
                    pipeline.take(message, frames)
                case Stop(), _:
                    pipeline.send(wait=True)
                    return
            pipeline.send()


if __name__ == "__main__":
    run_process(serve, PARTS)

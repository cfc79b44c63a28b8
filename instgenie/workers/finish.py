"""The finish process of a worker: turns latents into encoded pictures, final and partial ones. Takes no step.

A GPU decodes one picture after the other. Meanwhile threads composite and encode those already decoded, which takes a
CPU longer than decoding takes a GPU. Pictures are sent in the order in which they arrived. On a CPU each picture is
decoded and encoded before the next.
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
from instgenie.cluster.wire import Finish, Frame, JobFailed, Painted, read_mask, read_picture
from instgenie.engine.finish import decode
from instgenie.engine.warm import warm_up_finishing
from instgenie.models.family import PartKind
from instgenie.models.model import Model
from instgenie.pictures.compositing import paint, whole_picture
from instgenie.pictures.matching import ring_width
from instgenie.pictures.picture import encode_picture
from instgenie.telemetry import traces
from instgenie.types import Box, PixelMask, Source, Whole
from instgenie.workers.frames import read_tensor
from instgenie.workers.inbox import Inbox
from instgenie.workers.line import Line
from instgenie.workers.locker import Locker
from instgenie.workers.process import failure, run_process, say_ready

PARTS: frozenset[PartKind] = frozenset({"vae"})

Encode = Callable[[], tuple[bytes, float]]  # returns the encoded picture and the seconds it took


class Finisher:
    """Finishes one picture after the other."""

    def __init__(self, model: Model, line: Line) -> None:
        self.model = model
        self.line = line

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        try:
            encoded, _ = self.decode(message, frames)()
        except Exception as error:
            self.line.send(failure(message, error))
        else:
            self.send(message, encoded, time.perf_counter() - start)

    def decode(self, message: Finish, frames: list[Frame]) -> Encode:
        """Decode a picture. Returns the rest of the work, which any thread can do."""
        latents = read_tensor(message.latents, frames[0]).to(self.model.device)
        mask, rings = read_edit_mask(message, frames[2]), [ring_width(message.crop is not None)]
        [decoded] = decode([latents], [mask], message.grid, self.model, rings)
        return partial(encode, message, frames, decoded)

    def send(self, message: Finish, encoded: bytes, seconds: float, thread_seconds: float = 0.0) -> None:
        self.line.send(Painted(message.id, message.attempt, message.partial, seconds, thread_seconds), [encoded])
        spent = seconds + thread_seconds
        traces.record(message.trace, "finish", spent, attempt=message.attempt, partial=message.partial)

    def cancel(self, id: str) -> None:
        """Drop the pictures of an edit that are not yet sent. Here each is sent at once."""

    def send_done(self) -> None:
        """Send the pictures that are done. Here each is sent at once."""

    def close(self) -> None:
        """Finish and send what is left. Here nothing is."""


@dataclass(frozen=True, eq=False)
class PendingPicture:
    """A picture that a thread encodes, or why decoding it failed."""

    message: Finish
    seconds: float  # spent on decoding
    encoded: Future[tuple[bytes, float]] | JobFailed

    @property
    def is_done(self) -> bool:
        return isinstance(self.encoded, JobFailed) or self.encoded.done()


class ThreadedFinisher(Finisher):
    """Decodes a picture while threads encode those before it."""

    def __init__(self, model: Model, line: Line) -> None:
        super().__init__(model, line)
        self.pool = ThreadPoolExecutor(NUM_ENCODERS, "encode")
        self.pending: deque[PendingPicture] = deque()

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        encoded: Future[tuple[bytes, float]] | JobFailed
        try:
            encoded = self.pool.submit(self.decode(message, frames))
            encoded.add_done_callback(lambda _: self.line.wake())
        except Exception as error:
            encoded = failure(message, error)
        self.pending.append(PendingPicture(message, time.perf_counter() - start, encoded))

    def cancel(self, id: str) -> None:
        """Drop the pictures of an edit. A thread that has begun with one goes on, and its result is not sent."""
        for picture in [picture for picture in self.pending if picture.message.id == id]:
            self.pending.remove(picture)
            if isinstance(picture.encoded, Future):
                picture.encoded.cancel()

    def send_done(self) -> None:
        """Send pictures in order, up to the first that is not done."""
        while self.pending and self.pending[0].is_done:
            self.send_first()

    def send_first(self) -> None:
        first = self.pending.popleft()
        message, encoded = first.message, first.encoded
        if isinstance(encoded, JobFailed):
            self.line.send(encoded)
        elif error := encoded.exception():
            self.line.send(failure(message, error))
        else:
            picture, thread_seconds = encoded.result()
            self.send(message, picture, first.seconds, thread_seconds)

    def close(self) -> None:
        while self.pending:
            self.send_first()
        self.pool.shutdown()


def encode(message: Finish, frames: list[Frame], decoded: NDArray[np.uint8]) -> tuple[bytes, float]:
    start = time.perf_counter()
    picture, mask = read_picture(frames[1], message.size, message.num_channels), read_edit_mask(message, frames[2])
    source = Source(picture if message.is_own else None, message.profile, message.exif)
    box = box_of(message)
    whole = Whole(picture, source, box) if box else whole_picture(picture, source)
    edited = paint(whole, decoded, mask, message.feather, message.seed)
    encoded = encode_picture(edited, message.output_format, message.output_compression, is_quick=True, source=source)
    return encoded, time.perf_counter() - start


def box_of(message: Finish) -> Box | None:
    """The part of the picture that was edited; None: all of it."""
    if message.crop is None:
        return None
    top, bottom, left, right = message.crop
    return Box(range(top, bottom), range(left, right))


def read_edit_mask(message: Finish, frame: Frame) -> PixelMask:
    box = box_of(message)
    return read_mask(frame, box.size if box else message.size)


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    warm_up_finishing(model)
    say_ready(line, model)
    finisher = ThreadedFinisher(model, line) if model.device.type == "cuda" else Finisher(model, line)
    run(finisher, Locker(config.hold_bytes, config.hold_seconds))


def run(finisher: Finisher, locker: Locker[list[Frame]] | None = None) -> None:
    """Finish pictures until the process is told to stop."""
    inbox = Inbox(finisher.line, finisher.cancel, locker)
    while not inbox.is_done:
        if task := inbox.next():
            finisher.handle(*task)
        finisher.send_done()
    finisher.close()


def main(config: str) -> None:
    run_process(config, serve, PARTS)

"""The finish process of a worker: latents become encoded pictures, final ones and those on the way. Takes no step."""

import time

from instgenie import traces
from instgenie.config import ProcessConfig
from instgenie.engine.finish import decode
from instgenie.engine.frames import read_tensor
from instgenie.models.model import Model
from instgenie.picture import composite, encode_picture
from instgenie.wire import Finish, Frame, Painted, Stop, read_mask, read_picture
from instgenie.workers.process import Line, failure, run_process

PARTS = frozenset({"vae"})


class Finisher:
    def __init__(self, model: Model, line: Line) -> None:
        self.model = model
        self.line = line

    def handle(self, message: Finish, frames: list[Frame]) -> None:
        start = time.perf_counter()
        try:
            encoded = self.paint(message, frames)
        except Exception as error:
            self.line.send(failure(message.id, message.attempt, error))
            return
        seconds = time.perf_counter() - start
        self.line.send(Painted(message.id, message.attempt, message.partial, seconds), [encoded])
        traces.record(message.trace, "finish", seconds, attempt=message.attempt, partial=message.partial)

    def paint(self, message: Finish, frames: list[Frame]) -> bytes:
        latents = read_tensor(message.latents, frames[0]).to(self.model.device)
        picture, mask = read_picture(frames[1], message.size), read_mask(frames[2], message.size)
        [decoded] = decode([latents], [mask], message.grid, self.model)
        edited = composite(picture, decoded, mask, message.feather)
        return encode_picture(edited, message.output_format, message.output_compression, is_quick=True)


def serve(config: ProcessConfig, model: Model, line: Line) -> None:
    finisher = Finisher(model, line)
    while True:
        match line.receive(wait=True):
            case Finish() as message, frames:
                finisher.handle(message, frames)
            case Stop(), _:
                return


if __name__ == "__main__":
    run_process(serve, PARTS)

"""Preparing and finishing in the process that takes the steps, for workers that have no other: what is to be done, and
in which order. When it is done is for the step loop to say.

What is denoised is finished first, then edits are prepared, as many as the next batch takes, then templates. Whatever
was prepared or denoised goes to the cluster and comes back for its next stage; until then it is away.
"""

from collections import deque
from typing import TypeAlias

from instgenie.cluster.wire import Finish, Frame, Prepare, PrepareTemplate
from instgenie.models.model import Model
from instgenie.workers.finish import Finisher
from instgenie.workers.prepare import Preparer
from instgenie.workers.process import Line

Chore: TypeAlias = Prepare | PrepareTemplate | Finish
Queue: TypeAlias = deque[tuple[Chore, list[Frame]]]


class Chores:
    def __init__(self, model: Model, line: Line, max_batch_size: int) -> None:
        self.preparer, self.finisher = Preparer(model, line), Finisher(model, line)
        self.max_batch_size = max_batch_size
        self.to_finish, self.to_prepare, self.templates = Queue(), Queue(), Queue()
        self.away: set[str] = set()

    def add(self, message: Chore, frames: list[Frame]) -> None:
        self.away.discard(message.id)
        queues: dict[type, Queue] = {Finish: self.to_finish, Prepare: self.to_prepare, PrepareTemplate: self.templates}
        queues[type(message)].append((message, frames))

    def drop(self, id: str) -> None:
        self.away.discard(id)
        for queue in (self.to_finish, self.to_prepare, self.templates):
            for chore in [chore for chore in queue if chore[0].id == id]:
                queue.remove(chore)

    def due(self, num_waiting: int) -> Queue | None:
        """Where the next chore is, if there is any, while so many edits wait for the next batch."""
        if self.to_finish:
            return self.to_finish
        if self.to_prepare:
            return self.to_prepare if num_waiting + len(self.away) < self.max_batch_size else None
        return self.templates if self.templates and not (num_waiting or self.away) else None

    def do(self, message: Chore, frames: list[Frame]) -> bool:
        """Whether an edit comes back from it."""
        if isinstance(message, Finish):
            self.finisher.handle(message, frames)
            return False
        return self.preparer.handle(message, frames) and isinstance(message, Prepare)

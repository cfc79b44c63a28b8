"""Preparing and finishing in the process that takes the steps, as workers with `static` or `naive` batching do. Such
workers exist to compare with.

A naive worker does side tasks as they arrive, between steps. A static worker does them between two batches: it
finishes edits first, then prepares as many as the next batch takes, then prepares templates. A prepared or denoised
edit goes to the cluster and comes back for its next stage; in between it is away.
"""

import time
from collections import deque
from typing import TypeAlias

from instgenie.cluster.wire import Finish, Frame, Prepare, PrepareTemplate
from instgenie.models.model import Model
from instgenie.scheduling.names import Batching
from instgenie.workers.finish import Finisher
from instgenie.workers.line import Line
from instgenie.workers.prepare import Preparer

LONGEST_TRIP = 0.5  # seconds that an edit takes to the cluster and back

SideTask: TypeAlias = Prepare | PrepareTemplate | Finish
TaskQueue: TypeAlias = deque[tuple[SideTask, list[Frame]]]


class SideWork:
    def __init__(self, model: Model, line: Line, max_batch_size: int, batching: Batching) -> None:
        self.preparer, self.finisher = Preparer(model, line), Finisher(model, line)
        self.max_batch_size = max_batch_size
        self.is_static = batching == "static"
        self.to_finish, self.to_prepare, self.templates = TaskQueue(), TaskQueue(), TaskQueue()
        self.away: set[str] = set()  # edits on their way to the cluster and back
        self.waits_until = 0.0

    def take(self, message: SideTask, frames: list[Frame]) -> bool:
        """Do a task now, or in a static worker between batches. Partial pictures are always finished now, because the
        client looks at them meanwhile. Returns whether the task was done now."""
        is_partial = isinstance(message, Finish) and message.partial is not None
        if self.is_static and not is_partial:
            self.put_off(message, frames)
            return False
        self.do(message, frames)
        return True

    def put_off(self, message: SideTask, frames: list[Frame]) -> None:
        self.away.discard(message.id)
        queues: dict[type, TaskQueue] = {
            Finish: self.to_finish,
            Prepare: self.to_prepare,
            PrepareTemplate: self.templates,
        }
        queues[type(message)].append((message, frames))

    def cancel(self, id: str) -> None:
        self.away.discard(id)
        for queue in (self.to_finish, self.to_prepare, self.templates):
            for task in [task for task in queue if task[0].id == id]:
                queue.remove(task)

    def handed_over(self, id: str) -> None:
        """Note that an edit was denoised. A static worker waits for it to come back to be finished."""
        if self.is_static:
            self.away.add(id)

    def due(self, num_waiting: int) -> TaskQueue | None:
        """The queue of the next task, if any is due while `num_waiting` edits wait for the next batch."""
        if self.to_finish:
            return self.to_finish
        if self.to_prepare:
            return self.to_prepare if num_waiting + len(self.away) < self.max_batch_size else None
        return self.templates if self.templates and not (num_waiting or self.away) else None

    def is_pending(self, num_waiting: int) -> bool:
        return bool(self.away or self.due(num_waiting))

    def start_waiting(self) -> None:
        self.waits_until = time.monotonic() + LONGEST_TRIP

    def advance(self, num_waiting: int) -> bool:
        """Do the next task that is due. Returns False when none is due and none is expected. Edits that are away are
        expected, but not for long: some are cancelled, and some wait in the cluster for the rest of their group."""
        if queue := self.due(num_waiting):
            message, frames = queue.popleft()
            if self.do(message, frames):
                self.away.add(message.id)
            self.start_waiting()
            return True
        if self.away and time.monotonic() <= self.waits_until:
            return True
        self.away.clear()
        return False

    def is_waiting(self, num_waiting: int) -> bool:
        """Return whether all there is to do is to wait for edits that are away."""
        return bool(self.away) and not self.due(num_waiting)

    def do(self, message: SideTask, frames: list[Frame]) -> bool:
        """Do a task. Returns whether an edit will come back from the cluster because of it."""
        if isinstance(message, Finish):
            self.finisher.handle(message, frames)
            return False
        return self.preparer.handle(message, frames) and isinstance(message, Prepare)

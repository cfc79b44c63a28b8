"""The inbox of a process that does one task after the other: prepare and finish. It reads all messages between two
tasks, so that a task that is cancelled before it has begun is never done."""

from collections import deque
from collections.abc import Callable
from typing import Any

from instgenie.cluster.wire import Cancel, Collect, Collected, Deposit, Dropped, Frame, Message, PrepareTemplate, Stop
from instgenie.workers.line import Line
from instgenie.workers.locker import Locker

MAX_PASSED = 8  # edits that go before a template


class Inbox:
    def __init__(
        self, line: Line, on_cancel: Callable[[str], None] = lambda id: None, locker: Locker[list[Frame]] | None = None
    ) -> None:
        """`on_cancel` drops what the process keeps of a task that has begun; the locker keeps answers of fronts."""
        self.line = line
        self.locker: Locker[list[Frame]] = locker or Locker(0, 0.0)
        self.on_cancel = on_cancel
        self.is_stopped = False
        self._edits: deque[tuple[Any, list[Frame]]] = deque()  # and templates that an edit waits for
        self._templates: deque[tuple[Any, list[Frame]]] = deque()
        self._num_passed = 0  # edits that went before the first template

    @property
    def is_done(self) -> bool:
        """True once the process is to stop and nothing is left to do."""
        return self.is_stopped and not (self._edits or self._templates)

    def next(self) -> tuple[Any, list[Frame]] | None:
        """Read all messages and return the next task, if there is one; edits go before templates, but not for
        ever. Without a task it waits a moment for one."""
        wait = not (self._edits or self._templates)
        while not self.is_stopped and (received := self.line.receive(wait)):
            self.accept(*received)
            wait = False
        if self._templates and (not self._edits or self._num_passed >= MAX_PASSED):
            self._num_passed = 0
            return self._templates.popleft()
        self._num_passed += bool(self._templates)
        return self._edits.popleft() if self._edits else None

    def accept(self, message: Message, frames: list[Frame]) -> None:
        match message:
            case Stop():
                self.is_stopped = True
            case Cancel(id):
                self.cancel(id)
                self.on_cancel(id)
                self.line.send(Dropped(id))
            case Deposit(name):
                self.locker.put(name, frames, sum(map(len, frames)))
            case Collect(name):
                kept = self.locker.get(name)
                self.line.send(Collected(name, kept is not None), kept or ())
            case PrepareTemplate(is_urgent=False):
                self._templates.append((message, frames))
            case _:
                self._edits.append((message, frames))

    def cancel(self, id: str) -> None:
        """Drop the tasks of an edit or of a template."""
        self._edits = deque(task for task in self._edits if task[0].id != id)
        self._templates = deque(task for task in self._templates if task[0].id != id)

"""Progress of long commands on stderr: bars in a terminal, plain lines with a time between them elsewhere.

    with Progress() as progress:
        task = progress.add("measuring", total=60)
        task.advance()

A plain line reads `measuring 12/60 (20 %) 0:01:10`. A task prints one when it begins, if its size is known by then, one
when it ends, and in between at most one every few seconds.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from rich import progress as rich_progress
from rich.console import Console

from instgenie.types import OnBytes

SECONDS_BETWEEN_LINES = 5.0


def has_screen(console: Console) -> bool:
    """True if bars can be drawn; a pipe that is forced to colours has no screen."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def show_status(text: str, console: Console | None = None) -> Iterator[None]:
    """Say what happens while the block runs: beside a spinner in a terminal, as a line elsewhere."""
    console = console or Console(stderr=True)
    if has_screen(console):
        with console.status(text):
            yield
    else:
        print_line(text, console)
        yield


def print_line(text: str, console: Console) -> None:
    print(text, file=console.file, flush=True)


class Task(ABC):
    """One thing that is counted. `total` may be learnt later; until then only the count is shown."""

    def __init__(self, name: str, total: float | None, is_counted: bool) -> None:
        self.name, self.total, self.is_counted = name, total, is_counted
        self.done = 0.0
        self.note = ""

    def advance(self, count: float = 1) -> None:
        self.update(self.done + count)

    def update(self, done: float, total: float | None = None) -> None:
        self.done, self.total = done, self.total if total is None else total
        self.show()

    def say(self, note: str) -> None:
        """Show what is being done now beside the count."""
        self.note = note
        self.show()

    @property
    def is_finished(self) -> bool:
        return self.total is not None and self.done >= self.total

    @property
    def count(self) -> str:
        """`12/60 (20 %)`; without the share while the total is unknown, without the count if it means nothing."""
        if not self.total:
            return f"{self.done:g}"
        share = f"{self.done / self.total:.0%}".replace("%", " %")
        return f"{self.done:g}/{self.total:g} ({share})" if self.is_counted else share

    @abstractmethod
    def show(self) -> None: ...


class ProgressBar(Task):
    def __init__(self, bars: rich_progress.Progress, name: str, total: float | None, is_counted: bool) -> None:
        super().__init__(name, total, is_counted)
        self.bars = bars
        self.id = bars.add_task(name, total=total, count=self.count, note="")

    def show(self) -> None:
        self.bars.update(self.id, completed=self.done, total=self.total, count=self.count, note=self.note)


class ProgressLines(Task):
    def __init__(
        self, console: Console, clock: Callable[[], float], name: str, total: float | None, is_counted: bool
    ) -> None:
        super().__init__(name, total, is_counted)
        self.console, self.clock = console, clock
        self.start = clock()
        self.printed_at: float | None = None
        self.has_ended = False
        if total is not None:
            self.print()

    def show(self) -> None:
        if self.is_finished:
            if not self.has_ended:
                self.has_ended = True
                self.print()
        elif self.printed_at is None or self.clock() - self.printed_at >= SECONDS_BETWEEN_LINES:
            self.print()

    def print(self) -> None:
        self.printed_at = self.clock()
        elapsed = timedelta(seconds=int(self.printed_at - self.start))
        print_line(" ".join(filter(None, [self.name, self.count, str(elapsed), self.note])), self.console)


class Progress:
    """The tasks of a command. Bars of a transient progress vanish at its end."""

    def __init__(
        self, console: Console | None = None, transient: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(stderr=True)
        self.clock = clock
        self.bars = make_bars(self.console, transient) if has_screen(self.console) else None

    def __enter__(self) -> "Progress":
        if self.bars:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars:
            self.bars.stop()

    def add(self, name: str, total: float | None = None, is_counted: bool = True) -> Task:
        """Begin a task. Where its count means nothing to a reader, only the share is shown."""
        if self.bars:
            return ProgressBar(self.bars, name, total, is_counted)
        return ProgressLines(self.console, self.clock, name, total, is_counted)


class ByteTasks:
    """Tasks that are counted in bytes, by name, each with its rate: `loading, GB 3.2/23.8 (13 %) 0:00:01 8.1 GB/s`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._tasks: dict[str, tuple[Task, float]] = {}  # and when they began

    def update(self, name: str, done: int, total: int) -> None:
        now = self.progress.clock()
        if name not in self._tasks:
            self._tasks[name] = self.progress.add(f"{name}, GB", round(total / 1e9, 1)), now
        task, start = self._tasks[name]
        task.note = f"{done / 1e9 / max(now - start, 1e-3):.1f} GB/s"
        task.update(task.total if done == total and task.total else round(done / 1e9, 1))


@contextmanager
def show_loading(name: str = "loading", console: Console | None = None, min_bytes: int = 10**9) -> Iterator[OnBytes]:
    """Yield a function that shows how many bytes are loaded, where they are many."""
    with Progress(console, transient=True) as progress:
        tasks = ByteTasks(progress)

        def on_bytes(done: int, total: int) -> None:
            if total >= min_bytes:
                tasks.update(name, done, total)

        yield on_bytes


def make_bars(console: Console, transient: bool) -> rich_progress.Progress:
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.fields[count]}"),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("[dim]{task.fields[note]}"),
    )
    return rich_progress.Progress(*columns, console=console, transient=transient)

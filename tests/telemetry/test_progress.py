"""Progress of commands: lines where there is no terminal, bars where there is one."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from instgenie.telemetry.progress import SECONDS_BETWEEN_LINES, ByteTasks, Progress, show_loading, show_status

SIMULATE = ["bench", "simulate", "--workers", "2", "--num-prompts", "30", "--size", "64x64", "--policy", "tokens"]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def written(clock: Clock, name: str, seconds: list[float], total: float | None, **options: bool) -> list[str]:
    """The lines of a task that advances by one at each of these times."""
    file = io.StringIO()
    with Progress(Console(file=file), clock=clock) as progress:
        task = progress.add(name, total, **options)
        for at in seconds:
            clock.seconds = at
            task.advance()
    return file.getvalue().splitlines()


def test_lines_come_at_the_ends_and_seconds_apart() -> None:
    pause = SECONDS_BETWEEN_LINES
    lines = written(Clock(), "measuring", [0.1, 0.2, pause + 1, pause + 2, 70.0], 5)
    assert lines == [
        "measuring 0/5 (0 %) 0:00:00",
        f"measuring 3/5 (60 %) 0:00:0{int(pause) + 1}",
        "measuring 5/5 (100 %) 0:01:10",
    ]


def test_a_task_of_unknown_size_says_its_count() -> None:
    assert written(Clock(), "steps", [1.0, 2.0, 9.0], None) == ["steps 1 0:00:01", "steps 3 0:00:09"]


def test_a_task_that_counts_nothing_says_its_share() -> None:
    assert written(Clock(), "all", [1.0, 2.0], 2, is_counted=False) == ["all 0 % 0:00:00", "all 100 % 0:00:02"]


def test_the_end_is_said_once_and_notes_are_said() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(Console(file=file), clock=clock) as progress:
        task = progress.add("parts")
        task.say("first")
        clock.seconds = 60.0
        task.update(1, 2)
        task.update(2, 2)
        task.update(2, 2)
    assert file.getvalue().splitlines() == [
        "parts 0 0:00:00 first",
        "parts 1/2 (50 %) 0:01:00 first",
        "parts 2/2 (100 %) 0:01:00 first",
    ]


def test_bytes_have_a_rate() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress(Console(file=file), clock=clock) as progress:
        tasks = ByteTasks(progress)
        for at, done in ((0.0, 10**8), (6.0, 12 * 10**9), (7.0, 13 * 10**9), (8.0, 23_970_000_000)):
            clock.seconds = at
            tasks.update("loading", done, 23_970_000_000)
    assert file.getvalue().splitlines() == [
        "loading, GB 0/24 (0 %) 0:00:00",
        "loading, GB 12/24 (50 %) 0:00:06 2.0 GB/s",
        "loading, GB 24/24 (100 %) 0:00:08 3.0 GB/s",
    ]


def test_few_bytes_are_not_shown() -> None:
    file = io.StringIO()
    with show_loading("loading", Console(file=file)) as on_bytes:
        on_bytes(5, 10)
        assert not file.getvalue()
        on_bytes(2 * 10**9, 2 * 10**9)
    assert "loading, GB 2/2 (100 %)" in file.getvalue()


def test_colours_forced_into_a_pipe_make_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    with show_status("loading", Console(file=file)), Progress(Console(file=file)) as progress:
        progress.add("measuring", 1).advance()
    assert file.getvalue().splitlines() == ["loading", "measuring 0/1 (0 %) 0:00:00", "measuring 1/1 (100 %) 0:00:00"]


def test_a_command_in_a_pipe_prints_lines(folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "instgenie", *SIMULATE, "--model", str(folders["fill"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loading the model\ntokens 0/30 \(0 %\) 0:00:00\n(tokens .*\n)*", done.stderr)
    assert re.search(r"^tokens 30/30 \(100 %\) \d:\d\d:\d\d$", done.stderr, re.MULTILINE)
    assert "0/30" not in done.stdout


def test_a_command_in_a_terminal_draws_bars(folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "instgenie", *SIMULATE, "--model", str(folders["fill"])]
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    drawn = read_all(ours)
    os.close(ours)
    assert process.wait() == 0
    assert "\x1b[" in drawn
    assert "30/30 (100 %)" in drawn


def read_all(terminal: int) -> str:
    """What is written to a terminal until its other end is closed."""
    parts = []
    while select.select([terminal], [], [], 120)[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode()

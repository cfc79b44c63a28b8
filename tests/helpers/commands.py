"""Running our command, in a process of its own or in this one."""

import os
import subprocess
import sys
from pathlib import Path

from instgenie.cli import main

EDIT = ["--prompt", "a red cat", "--size", "48x32", "--steps", "3"]


def instgenie_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"} | variables
    command = [sys.executable, "-m", "instgenie", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def edit_here(*arguments: str) -> int:
    return main(["edit", "photo.jpg", "--device", "cpu", *EDIT, *arguments])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}

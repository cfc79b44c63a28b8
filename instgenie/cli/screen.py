"""What commands say on the screen: progress, complaints, and nothing of what libraries say to developers."""

import os
import sys
import warnings
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def complain(text: str) -> None:
    print(f"instgenie: {' '.join(text.split())}", file=sys.stderr)


def quiet_libraries() -> None:
    """What libraries say to developers is not for the users of a command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def hide_loading_bars() -> None:
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def edit_progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def show_steps(progress: Progress, name: str) -> Callable[[int, int], None]:
    """What an editor calls after each step, to move a new line of the progress bar."""
    task = progress.add_task(name, total=None)

    def on_step(num_done: int, num_steps: int) -> None:
        progress.update(task, completed=num_done, total=num_steps)

    return on_step

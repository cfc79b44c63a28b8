"""Messages of commands on stderr, and silence for the messages of libraries."""

import os
import sys
import warnings


def complain(text: str) -> None:
    print(f"instgenie: {' '.join(text.split())}", file=sys.stderr)


def quiet_libraries() -> None:
    """Hide the messages that libraries address to developers."""
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

"""Files that appear under their name only when they are complete."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is being written


@contextmanager
def complete_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. What the block writes there is renamed to `path` if the block succeeds and
    removed if it fails. So `path` always holds either the old file or all of the new one, even if this process is
    killed; with `durable` also after a power cut, because the bytes reach the disk before the name changes."""
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        if durable:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()

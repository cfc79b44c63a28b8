"""Files that appear under their name only when they are complete, and reading to many places at once."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is being written


def read_into(file: int, places: Sequence[memoryview], offset: int) -> None:
    """Fill places in memory with the bytes of an open file from an offset on. Raises an OSError if it ends before."""
    rest = [place for place in places if len(place)]
    while rest:
        num_read = os.preadv(file, rest, offset)
        if not num_read:
            raise OSError(f"the file ends at byte {offset:,}, where {sum(map(len, rest)):,} more bytes are expected")
        offset += num_read
        while rest and num_read >= len(rest[0]):
            num_read -= len(rest.pop(0))
        if num_read:
            rest[0] = rest[0][num_read:]


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

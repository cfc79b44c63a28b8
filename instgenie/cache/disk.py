"""The disk tier: activations as safetensors files, one per template and span of steps. Knows bytes, not models.

    FOLDER/<digest of the key>/0000-0003.safetensors    steps 0 to 3; header: format, key, steps, checksum
    FOLDER/<digest of the key>/picture.safetensors      the template's picture, if it was given
    FOLDER/<digest of the key>/used                     its time is the template's last use; locked while in use
    FOLDER/<digest of the key>/asked                    a client asked for the template: it does not expire

A file appears under its name when it is complete and on the disk. A process that dies leaves complete files and at most
one partial file, which the next process to use the template removes. A file is trusted only if header and checksum are
as expected: a torn, altered or foreign file is logged, removed, and counts as a miss. Several processes may share a
folder: each pins the templates it uses with a shared lock, and evicts only templates that no process has pinned.

A template is a hit when no span is missing, a miss when all are; in between its registration is pending.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.filesize import decimal
from safetensors import SafetensorError

from instgenie.cache.folder import PRIVATE, make_folder
from instgenie.cache.format import (
    ASKED,
    HEAD_BYTES,
    PICTURE,
    SUFFIX,
    USED,
    DamagedError,
    check_file,
    file_name,
    is_template,
    read_file,
    read_head,
    read_key,
    read_picture,
    write_file,
    write_picture,
)
from instgenie.cache.tier import Spill, Stored, Usage, keep_nothing, total
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.files import PARTIAL, complete_file
from instgenie.types import Pixels, TierName

logger = logging.getLogger(__name__)


class DiskTier:
    """Holds at most `max_bytes`; whole templates are evicted, the least recently used first."""

    name: TierName = "disk"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = make_folder(folder)
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self.spill: Spill = keep_nothing
        self._storing = threading.RLock()  # one writer at a time: two would share one estimate of the room left

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """The spans that are not there. Reads headers only; `load` checks the data, too."""
        return [steps for steps in spans if not self._find(key, steps)]

    def load(self, key: Key, steps: range) -> Span | None:
        """The span, if it is there and undamaged. Its tensors are views of the file and outlive its removal."""
        path = self._path(key, steps)
        with self._damage_removed(path):
            return read_file(path, key, steps)
        return None

    def reserve(self, key: Key, num_bytes: int) -> None:
        """Make room for a whole template before much is computed for it."""
        with self._storing:
            self._make_room(key, num_bytes - self.num_bytes(key))

    def store(self, key: Key, span: Span) -> None:
        self._write(key, file_name(span.steps), span.num_bytes, lambda path: write_file(path, key, span))

    def store_picture(self, key: Key, picture: Pixels) -> None:
        self._write(key, PICTURE, picture.nbytes, lambda path: write_picture(path, key, picture))

    def load_picture(self, key: Key) -> Pixels | None:
        path = self._template(key) / PICTURE
        with self._damage_removed(path):
            return read_picture(path, key)
        return None

    def pictures(self) -> Mapping[Key, tuple[int, int]]:
        found = {}
        for template in self.stored():
            with contextlib.suppress(OSError, ValueError), open(self.folder / template.name / PICTURE, "rb") as file:
                key, size = read_head(file.read(HEAD_BYTES))
                found[key] = size
        return found

    def _write(self, key: Key, name: str, num_bytes: int, write: Callable[[Path], None]) -> None:
        path = self._template(key) / name
        with self._storing, self.pin(key):
            self._make_room(key, num_bytes)
            try:
                with complete_file(path, durable=True) as partial:
                    write(partial)
            except (OSError, SafetensorError) as error:
                raise CacheError(f"{path} ({decimal(num_bytes)}) cannot be written: {error}") from None

    @contextlib.contextmanager
    def pin(self, key: Key) -> Iterator[None]:
        """Keep the template from being evicted, by this process or another, until the block ends."""
        template = self._template(key)
        try:
            descriptor = hold(template)
        except OSError as error:
            raise CacheError(f"{template} cannot be used: {error.strerror}") from None
        try:
            yield
        finally:
            os.close(descriptor)  # releases the lock
            if not spans_of(template):
                evict(template, if_empty=True)

    def drop(self, key: Key) -> bool:
        template = self._template(key)
        try:
            remove([*files_of(template, SUFFIX), template / ASKED])
        except NotADirectoryError:
            return True
        except OSError as error:
            raise CacheError(f"{template} cannot be removed: {error.strerror}") from None
        if template.exists():
            evict(template, if_empty=True)  # a pinned template is removed when it is unpinned last
        return True

    def mark_asked_for(self, key: Key) -> None:
        template = self._template(key)
        try:
            if spans_of(template):
                (template / ASKED).touch(0o600)
        except OSError as error:
            raise CacheError(f"{template} cannot be marked: {error.strerror}") from None

    def expire(self, before: float) -> list[str]:
        old = [template for template in self.stored() if template.used < before and not template.is_asked_for]
        return [template.name for template in old if evict(self.folder / template.name)]

    def touch(self, key: Key) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._template(key) / USED)

    def num_bytes(self, key: Key) -> int:
        return measure(self._template(key)).num_bytes

    def usage(self) -> Usage:
        stored = self.stored()
        return Usage(len(stored), total(stored))

    def stored(self) -> list[Stored]:
        """All templates, the least recently used first. Other files in the folder are ignored."""
        folders = [path for path in self.folder.iterdir() if is_template(path.name)]
        return sorted((measure(folder) for folder in folders), key=lambda template: template.used)

    def _template(self, key: Key) -> Path:
        return self.folder / key.name

    def _path(self, key: Key, steps: range) -> Path:
        return self._template(key) / file_name(steps)

    def _find(self, key: Key, steps: range) -> bool:
        path = self._path(key, steps)
        with self._damage_removed(path):
            check_file(path, key, steps)
            return True
        return False

    @contextlib.contextmanager
    def _damage_removed(self, path: Path) -> Iterator[None]:
        """Treat a missing file as a miss, and a damaged one too, after logging and removing it."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (OSError, SafetensorError, DamagedError) as error:
            logger.warning("%s is removed and its steps will be registered again: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()

    def _make_room(self, key: Key, num_bytes: int) -> None:
        """Evict templates until `num_bytes` fit within the limit and on the disk; none if that would not suffice."""
        stored, free = self.stored(), shutil.disk_usage(self.folder).free
        others = [template for template in stored if template.name != key.name]
        lacking = max(total(stored) + num_bytes - self.max_bytes, num_bytes - free)
        if lacking <= total(others):
            for template in others:
                if lacking > 0 and self._evict(template):
                    lacking -= template.num_bytes
        if lacking > 0:
            raise CacheError(
                f"{self.folder} has no room for {decimal(num_bytes)} of activations: it may hold "
                f"{decimal(self.max_bytes)} and holds {decimal(total(stored))}, the disk has {decimal(free)} free"
            )

    def _evict(self, template: Stored) -> bool:
        folder = self.folder / template.name
        if is_pinned(folder):
            return False
        if key := find_key(folder):
            with self.pin(key):
                self.spill(key)
        is_gone = evict(folder)
        self.num_evictions += is_gone
        return is_gone


def find_key(template: Path) -> Key | None:
    """The key of a template's folder, if a file in it has a readable header."""
    for path in files_of(template, SUFFIX):
        with contextlib.suppress(OSError, SafetensorError, ValueError):
            key = read_key(path)
            return key if key.name == template.name else None
    return None


def hold(template: Path) -> int:
    """A descriptor with a shared lock on the template, whose folder is made if necessary and which counts as used now.
    If no other process has it locked, partial files that a dead process left are removed."""
    while True:
        try:
            template.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            descriptor = os.open(template / USED, os.O_RDWR | os.O_CREAT, 0o600)
        except (FileNotFoundError, FileExistsError):
            if os.path.lexists(template) and not template.is_dir():
                raise
            continue  # evicted meanwhile
        if lock_alone(descriptor):
            remove(files_of(template, PARTIAL))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            os.utime(descriptor)
            return descriptor
        os.close(descriptor)  # evicted meanwhile


def lock_alone(descriptor: int) -> bool:
    """Take the exclusive lock if it is free; a lock on a file that was removed meanwhile does not count."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def is_pinned(template: Path) -> bool:
    try:
        descriptor = os.open(template / USED, os.O_RDWR)
    except OSError:
        return False
    try:
        return not lock_alone(descriptor)
    finally:
        os.close(descriptor)


def evict(template: Path, if_empty: bool = False) -> bool:
    """Remove a template and return whether it is gone. A pinned template stays, and with `if_empty` one with spans."""
    try:
        descriptor = os.open(template / USED, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return not template.exists()
    try:
        if lock_alone(descriptor) and not (if_empty and spans_of(template)):
            remove([*files_of(template, SUFFIX, PARTIAL), template / ASKED])
            remove([template / USED])
            template.rmdir()
    except OSError as error:
        if template.exists() and not (template / USED).exists():  # else it is gone, or in use again
            logger.warning("%s cannot be removed: %s", template, error)
    finally:
        os.close(descriptor)
    return not template.exists()


def files_of(template: Path, *suffixes: str) -> list[Path]:
    """The template's files with these suffixes; none if the template was removed meanwhile."""
    try:
        return [path for path in template.iterdir() if path.suffix in suffixes]
    except FileNotFoundError:
        return []


def spans_of(template: Path) -> list[Path]:
    return [path for path in files_of(template, SUFFIX) if path.name != PICTURE]


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def measure(template: Path) -> Stored:
    """Bytes and last use of a template. Files may vanish meanwhile."""
    num_bytes, used, is_asked_for = 0, 0.0, False
    with contextlib.suppress(OSError):
        for file in os.scandir(template):
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                num_bytes += status.st_size
                used = max(used, status.st_mtime)
                is_asked_for |= file.name == ASKED
    return Stored(template.name, num_bytes, used, is_asked_for)

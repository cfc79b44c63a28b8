"""The remote tier: the files of the disk tier behind any fsspec URL, such as `s3://bucket/templates`. Knows bytes and
patience; knows no protocol by itself.

    URL/<digest of the key>/0000-0003.safetensors    as on disk
    URL/<digest of the key>/picture.safetensors      as on disk
    URL/<digest of the key>/used                     as old as the template's last use

Object stores show an object when it is complete; elsewhere it is written under a temporary name and moved. A server
that refuses, or does not answer in time, is reported and left alone for a while, which grows as it stays away;
meanwhile everything is a miss. Nobody waits for an answer longer than the tier's patience, and what its bytes take.

Several machines may share a URL: their own pins hold for themselves alone, and what vanishes is a miss.
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from rich.filesize import decimal

from instgenie.cache.format import (
    HEAD_BYTES,
    PICTURE,
    SUFFIX,
    USED,
    DamagedError,
    decode,
    decode_picture,
    encode,
    encode_picture,
    file_name,
    is_template,
    read_head,
)
from instgenie.cache.tier import Spill, Stored, Usage, keep_nothing, total
from instgenie.errors import CacheError
from instgenie.jobs.activations import Key, Span
from instgenie.machine.files import PARTIAL
from instgenie.types import Pixels, TierName

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "memory"}  # of these protocols
SLOWEST = 10e6  # bytes per second; a server that is slower is as good as gone
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds for which a server that failed is left alone
TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")  # what protocols call an object's age

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class GoneError(Exception):
    """The server cannot be asked at present."""


class RemoteTier:
    """Holds at most `max_bytes`; the template that was used least recently goes first, and goes whole. Options are
    those of the protocol: endpoint, credentials."""

    name: TierName = "remote"

    def __init__(
        self, url: str, max_bytes: int, options: Mapping[str, Any] | None = None, patience: float = 10.0
    ) -> None:
        self.url = url
        self.max_bytes = max_bytes
        self.patience = patience
        self.num_evictions = 0
        self.spill: Spill = keep_nothing
        self._files, self._root = open_url(url, options or {})
        self._pins: Counter[str] = Counter()
        self._room = 0  # known to be left, by the last look at what is there
        self._usage = Usage(0, 0)  # at the last look
        self._pause, self._silent_until = FIRST_PAUSE, 0.0
        self._lock = threading.Lock()  # over pins and pause
        self._storing = threading.RLock()

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """Those of the spans that are not there; all, if the server cannot be asked. Looks at names alone."""
        if not spans:
            return []
        there = {path.rpartition("/")[2] for path in self._list(self._template(key))}
        return [steps for steps in spans if file_name(steps) not in there]

    def load(self, key: Key, steps: range) -> Span | None:
        span = self._load(self._path(key, steps), lambda data: decode(data, key, steps))
        if span and steps.start == 0:  # once for each template
            self._mark_used(key)
        return span

    def reserve(self, key: Key, num_bytes: int) -> None:
        with self._storing:
            self._make_room(key, num_bytes - self.num_bytes(key))

    def store(self, key: Key, span: Span) -> None:
        self._store(key, self._path(key, span.steps), encode(key, span))

    def store_picture(self, key: Key, picture: Pixels) -> None:
        self._store(key, f"{self._template(key)}/{PICTURE}", encode_picture(key, picture))

    def load_picture(self, key: Key) -> Pixels | None:
        return self._load(f"{self._template(key)}/{PICTURE}", lambda data: decode_picture(data, key))

    def pictures(self) -> Mapping[Key, tuple[int, int]]:
        """None, if the server cannot be asked. Reads of each what its header may take."""
        found = {}
        for path, info in self._list(self._root).items():
            if path.endswith(f"/{PICTURE}"):
                with contextlib.suppress(FileNotFoundError, GoneError, ValueError):
                    num_bytes = min(info["size"] or 0, HEAD_BYTES)
                    read = partial(self._files.cat_file, path, start=0, end=num_bytes)
                    key, size = read_head(self._ask(read, num_bytes))
                    found[key] = size
        return found

    def _load(self, path: str, decode: Callable[[bytes], Answer]) -> Answer | None:
        """What is damaged is removed."""
        try:
            return decode(self._read(path))
        except (FileNotFoundError, GoneError):
            return None
        except DamagedError as error:
            logger.warning("%s is removed, its steps will be registered again: %s", path, error)
            self._remove(path)
            return None

    def _store(self, key: Key, path: str, data: bytes) -> None:
        with self._storing, self.pin(key):
            self._make_room(key, len(data))
            try:
                self._ask(lambda: put(self._files, path, data), len(data))
            except (GoneError, FileNotFoundError) as error:
                raise CacheError(f"{path} ({decimal(len(data))}) cannot be written: {error}") from None
            self._room -= len(data)

    @contextlib.contextmanager
    def pin(self, key: Key) -> Iterator[None]:
        """Until the block ends this tier does not evict the template; another machine may."""
        with self._lock:
            self._pins[key.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[key.name] -= 1
                self._pins += Counter()  # keeps those that are above 0

    def drop(self, key: Key) -> None:
        self._remove(self._template(key))

    def num_bytes(self, key: Key) -> int:
        return sum(info["size"] for info in self._list(self._template(key)).values())

    def usage(self) -> Usage:
        """As it was at the last look, if the server cannot be asked."""
        with contextlib.suppress(GoneError):
            self._look()
        return self._usage

    def _template(self, key: Key) -> str:
        return f"{self._root}/{key.name}"

    def _path(self, key: Key, steps: range) -> str:
        return f"{self._template(key)}/{file_name(steps)}"

    def _ask(self, work: Callable[[], Answer], num_bytes: int = 0) -> Answer:
        """The server's answer, which may be that there is no such file. Whatever else comes, or if nothing does, it is
        left alone for a while: each protocol has errors of its own, and not one of them may reach an edit."""
        if time.monotonic() < self._silent_until:
            raise GoneError(f"{self.url} does not answer")
        try:
            answer = within(self.patience + num_bytes / SLOWEST, work)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._left_alone(error) from None
        self._pause = FIRST_PAUSE
        return answer

    def _left_alone(self, error: Exception) -> GoneError:
        with self._lock:
            pause, self._pause = self._pause, min(2 * self._pause, LAST_PAUSE)
            self._silent_until = time.monotonic() + pause
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s is left alone for %g seconds: %s", self.url, pause, reason)
        return GoneError(reason)

    def _read(self, path: str) -> bytes:
        num_bytes = self._ask(lambda: self._files.size(path)) or 0
        if num_bytes > self.max_bytes:
            raise DamagedError(f"it has {decimal(num_bytes)}: no more than {decimal(self.max_bytes)} are expected")
        data: bytes = self._ask(lambda: self._files.cat_file(path), num_bytes)
        if len(data) < num_bytes:
            raise self._left_alone(EOFError(f"{len(data)} of {num_bytes} bytes of {path} came"))
        return data

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        """What is below a folder, by path."""
        try:
            found: dict[str, dict[str, Any]] = self._ask(lambda: self._files.find(folder, detail=True))
            return found
        except (FileNotFoundError, GoneError):
            return {}

    def _look(self) -> list[Stored]:
        """The least recently used first."""
        try:
            found = self._ask(lambda: self._files.find(self._root, detail=True))
        except FileNotFoundError:
            found = {}
        stored = sorted(group(found), key=lambda template: template.used)
        self._usage = Usage(len(stored), total(stored))
        return stored

    def _make_room(self, key: Key, num_bytes: int) -> None:
        """Looks at what is there only where the room that is known to be left does not do."""
        if num_bytes <= self._room:
            return
        try:
            stored = self._look()
            self._room = self.max_bytes - total(stored)
            others = [one for one in stored if one.name != key.name and not self._pins[one.name]]
            if num_bytes <= self._room + total(others):
                while num_bytes > self._room:
                    self._evict(others.pop(0))
        except GoneError as error:
            raise CacheError(f"{self.url} cannot be written to: {error}") from None
        if num_bytes > self._room:
            raise CacheError(
                f"{self.url} has no room for {decimal(num_bytes)} of activations: it may hold "
                f"{decimal(self.max_bytes)} and holds {decimal(total(stored))}"
            )

    def _evict(self, template: Stored) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: remove(self._files, f"{self._root}/{template.name}"))
        self._room += template.num_bytes
        self.num_evictions += 1

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, GoneError):
            self._ask(lambda: remove(self._files, path))

    def _mark_used(self, key: Key) -> None:
        path = f"{self._template(key)}/{USED}"
        with contextlib.suppress(FileNotFoundError, GoneError):
            self._ask(lambda: put(self._files, path, b""))


def open_url(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system and the path on it. Nothing is remembered of what is there: others write to it too."""
    try:
        files, root = fsspec.url_to_fs(url, **options, skip_instance_cache=True, use_listings_cache=False)
    except (ImportError, ValueError, OSError) as error:
        raise CacheError(f"{url} cannot be a cache: {error} (pip install 'instgenie[remote]' brings s3)") from None
    if isinstance(files, LocalFileSystem):
        files.auto_mkdir = True
    return files, root.rstrip("/")


def put(files: Any, path: str, data: bytes) -> None:
    """Whole or not at all, as far as the protocol allows; what is torn nevertheless is noticed by who reads it."""
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if protocols & OBJECT_STORES:
        files.pipe_file(path, data)
        return
    unfinished = f"{path.rpartition('/')[0]}/{secrets.token_hex(8)}{PARTIAL}"
    try:
        files.pipe_file(unfinished, data)
        move(files, unfinished, path)
    except BaseException:
        with contextlib.suppress(Exception):
            files.rm_file(unfinished)
        raise


def remove(files: Any, path: str) -> None:
    """A file, or a folder with all there is in it; somebody else may be at it too."""
    try:
        files.rm(path, recursive=True)
    except OSError:
        if files.exists(path):
            raise


def move(files: Any, path: str, target: str) -> None:
    if isinstance(files, LocalFileSystem):
        os.chmod(path, 0o600)
        os.replace(path, target)
    else:
        files.mv(path, target)


def group(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Stored]:
    """Files by template. What else is there is none of ours."""
    num_bytes: Counter[str] = Counter()
    used: dict[str, float] = {}
    for path, info in found.items():
        folder, _, file = path.rpartition("/")
        name = folder.rpartition("/")[2]
        if is_template(name) and (file == USED or file.endswith((SUFFIX, PARTIAL))):
            num_bytes[name] += info["size"] or 0
            used[name] = max(used.get(name, 0.0), when(info))
    return (Stored(name, num_bytes[name], used[name]) for name in used)


def when(info: Mapping[str, Any]) -> float:
    """0 where a protocol does not tell."""
    told = next((info[name] for name in TIMES if info.get(name)), 0.0)
    if isinstance(told, str):
        told = datetime.fromisoformat(told)
    return told.timestamp() if isinstance(told, datetime) else float(told)


def within(seconds: float, work: Callable[[], Answer]) -> Answer:
    """What the work comes to. If it takes longer it is given up: it goes on unheard, and does not keep the process
    alive."""
    answers: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.1f} seconds") from None
    if error:
        raise error
    return answer  # type: ignore[return-value]

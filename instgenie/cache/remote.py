"""The remote tier: the files of the disk tier behind any fsspec URL, such as `s3://bucket/templates`. Knows bytes, not
models; fsspec knows the protocols.

    URL/<digest of the key>/0000-0003.safetensors    as on disk
    URL/<digest of the key>/picture.safetensors      as on disk
    URL/<digest of the key>/used                     as old as the template's last use
    URL/<digest of the key>/asked                    as on disk

Object stores show an object when it is complete; with other protocols it is written under a temporary name and moved. A
server that fails or does not answer in time is logged and left alone for a while, and everything is a miss meanwhile.
No caller waits longer than the tier's patience plus the time its bytes take.

Several machines may share a URL. A pin holds for its own machine only; a template that another machine removes is a
miss.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem
from rich.filesize import decimal

from instgenie.cache.format import (
    ASKED,
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
from instgenie.machine.backoff import Backoff, GoneError
from instgenie.machine.files import PARTIAL
from instgenie.machine.stores import TIMES, StoreUrlError, open_store
from instgenie.types import Pixels, TierName

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "memory"}  # protocols

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class RemoteTier:
    """Holds at most `max_bytes`; whole templates are evicted, the least recently used first. `options` are those of the
    protocol: endpoint, credentials."""

    name: TierName = "remote"

    def __init__(
        self, url: str, max_bytes: int, options: Mapping[str, Any] | None = None, patience: float = 10.0
    ) -> None:
        self.url = url
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self.spill: Spill = keep_nothing
        self._files, self._root = open_url(url, options or {})
        self._server = Backoff(url, patience)
        self._pins: Counter[str] = Counter()
        self._room = 0  # bytes known to be left at the last listing
        self._usage = Usage(0, 0)  # at the last listing
        self._lock = threading.Lock()  # guards the pins
        self._storing = threading.RLock()

    def missing(self, key: Key, spans: Sequence[range]) -> list[range]:
        """The spans that are not there; all of them if the server cannot be asked. Looks at names only."""
        if not spans:
            return []
        there = {path.rpartition("/")[2] for path in self._list(self._template(key))}
        return [steps for steps in spans if file_name(steps) not in there]

    def load(self, key: Key, steps: range) -> Span | None:
        path = f"{self._template(key)}/{file_name(steps)}"
        span = self._load(path, lambda data: decode(data, key, steps))
        if span and steps.start == 0:  # once per template
            self._mark_used(key)
        return span

    def reserve(self, key: Key, num_bytes: int) -> None:
        with self._storing:
            self._make_room(key, num_bytes - self.num_bytes(key))

    def store(self, key: Key, span: Span) -> None:
        self._store(key, f"{self._template(key)}/{file_name(span.steps)}", encode(key, span))

    def store_picture(self, key: Key, picture: Pixels) -> None:
        self._store(key, f"{self._template(key)}/{PICTURE}", encode_picture(key, picture))

    def load_picture(self, key: Key) -> Pixels | None:
        return self._load(f"{self._template(key)}/{PICTURE}", lambda data: decode_picture(data, key))

    def pictures(self) -> Mapping[Key, tuple[int, int]]:
        """The (height, width) of all pictures, read from their headers; none if the server cannot be asked."""
        found = {}
        for path, info in self._list(self._root).items():
            if path.endswith(f"/{PICTURE}"):
                with contextlib.suppress(FileNotFoundError, GoneError, ValueError):
                    num_bytes = min(info["size"] or 0, HEAD_BYTES)
                    read = partial(self._files.cat_file, path, start=0, end=num_bytes)
                    key, size = read_head(self._server.ask(read, num_bytes))
                    found[key] = size
        return found

    def _load(self, path: str, decode: Callable[[bytes], Answer]) -> Answer | None:
        """Read and decode a file; a damaged file is removed."""
        try:
            return decode(self._read(path))
        except (FileNotFoundError, GoneError):
            return None
        except DamagedError as error:
            logger.warning("%s is removed and its steps will be registered again: %s", path, error)
            self._remove(path)
            return None

    def _store(self, key: Key, path: str, data: bytes) -> None:
        with self._storing, self.pin(key):
            self._make_room(key, len(data))
            try:
                self._server.ask(lambda: put(self._files, path, data), len(data))
            except (GoneError, FileNotFoundError) as error:
                raise CacheError(f"{path} ({decimal(len(data))}) cannot be written: {error}") from None
            self._room -= len(data)

    @contextlib.contextmanager
    def pin(self, key: Key) -> Iterator[None]:
        """Keep the template from being evicted by this machine until the block ends; another machine may evict it."""
        with self._lock:
            self._pins[key.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[key.name] -= 1
                self._pins += Counter()  # drops zeros

    def drop(self, key: Key) -> bool:
        return self._remove(self._template(key))

    def mark_asked_for(self, key: Key) -> None:
        try:
            if self._list(self._template(key)):
                self._server.ask(lambda: put(self._files, f"{self._template(key)}/{ASKED}", b""))
        except (GoneError, FileNotFoundError) as error:
            raise CacheError(f"{self._template(key)} cannot be marked: {error}") from None

    def expire(self, before: float) -> list[str]:
        try:
            stored = self._list_templates()
        except GoneError:
            return []
        old = [one for one in stored if one.used < before and not one.is_asked_for and not self._pins[one.name]]
        return [template.name for template in old if self._remove(f"{self._root}/{template.name}")]

    def touch(self, key: Key) -> None:
        """Asks for the template first: a mark alone would look like a template."""
        if self._list(self._template(key)):
            self._mark_used(key)

    def num_bytes(self, key: Key) -> int:
        return sum(info["size"] for info in self._list(self._template(key)).values())

    def usage(self) -> Usage:
        """The usage now, or at the last listing if the server cannot be asked."""
        with contextlib.suppress(GoneError):
            self._list_templates()
        return self._usage

    def _template(self, key: Key) -> str:
        return f"{self._root}/{key.name}"

    def _read(self, path: str) -> bytes:
        num_bytes = self._server.ask(lambda: self._files.size(path)) or 0
        if num_bytes > self.max_bytes:
            raise DamagedError(f"it has {decimal(num_bytes)}, but at most {decimal(self.max_bytes)} are expected")
        data: bytes = self._server.ask(lambda: self._files.cat_file(path), num_bytes)
        if len(data) < num_bytes:
            raise self._server.failed(EOFError(f"{len(data)} of {num_bytes} bytes of {path} arrived"))
        return data

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        """The files below a folder, by path."""
        try:
            found: dict[str, dict[str, Any]] = self._server.ask(lambda: self._files.find(folder, detail=True))
            return found
        except (FileNotFoundError, GoneError):
            return {}

    def _list_templates(self) -> list[Stored]:
        """All templates, the least recently used first."""
        try:
            found = self._server.ask(lambda: self._files.find(self._root, detail=True))
        except FileNotFoundError:
            found = {}
        stored = sorted(group(found), key=lambda template: template.used)
        self._usage = Usage(len(stored), total(stored))
        return stored

    def _make_room(self, key: Key, num_bytes: int) -> None:
        """Evict templates to make room for `num_bytes`. Lists them only if the room known to be left is not enough."""
        if num_bytes <= self._room:
            return
        try:
            stored = self._list_templates()
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
            self._server.ask(lambda: remove(self._files, f"{self._root}/{template.name}"))
        self._room += template.num_bytes
        self.num_evictions += 1

    def _remove(self, path: str) -> bool:
        """Remove a file or a folder, and return whether it is gone; False if the server cannot be asked."""
        try:
            self._server.ask(lambda: remove(self._files, path))
        except FileNotFoundError:
            return True
        except GoneError:
            return False
        return True

    def _mark_used(self, key: Key) -> None:
        path = f"{self._template(key)}/{USED}"
        with contextlib.suppress(FileNotFoundError, GoneError):
            self._server.ask(lambda: put(self._files, path, b""))


def open_url(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system and the path on it."""
    try:
        files, root = open_store(url, **options)
    except StoreUrlError as error:
        raise CacheError(f"{url} cannot be a cache: {error}") from None
    if isinstance(files, LocalFileSystem):
        files.auto_mkdir = True
    return files, root


def put(files: Any, path: str, data: bytes) -> None:
    """Write a whole file or nothing, as far as the protocol allows; readers notice a torn file by its checksum."""
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
    """Remove a file, or a folder and all its files; another machine may do the same at once."""
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
    """Group files by template; other files are ignored."""
    num_bytes: Counter[str] = Counter()
    used: dict[str, float] = {}
    asked = set()
    for path, info in found.items():
        folder, _, file = path.rpartition("/")
        name = folder.rpartition("/")[2]
        if is_template(name) and (file in (USED, ASKED) or file.endswith((SUFFIX, PARTIAL))):
            asked |= {name} if file == ASKED else set()
            num_bytes[name] += info["size"] or 0
            used[name] = max(used.get(name, 0.0), when(info))
    return (Stored(name, num_bytes[name], used[name], name in asked) for name in used)


def when(info: Mapping[str, Any]) -> float:
    """The time of the last change, or 0 if the protocol does not tell."""
    told = next((info[name] for name in TIMES if info.get(name)), 0.0)
    if isinstance(told, str):
        told = datetime.fromisoformat(told)
    return told.timestamp() if isinstance(told, datetime) else float(told)

"""LoRAs behind a URL that fsspec knows, such as `s3://bucket/loras`: files called NAME.safetensors. Needs no torch.

Who answers requests reads the headers of files alone. A worker copies a file to the disk of its machine when an edit
needs it, while the edit takes its first steps. All processes of a machine share these copies; the least recently used
go first.
"""

import fcntl
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from instgenie.adapters.files import LoraFile
from instgenie.adapters.header import RawHeader, header_length, parse_header
from instgenie.errors import LoraError, LoraStoreError
from instgenie.machine.backoff import Backoff, GoneError
from instgenie.machine.files import complete_file
from instgenie.machine.stores import TIMES, StoreUrlError, open_store
from instgenie.types import LoraUse

SUFFIX = ".safetensors"
SECONDS_FRESH = 10.0  # for which what is known of a file is not asked again
PATIENCE = 5.0  # seconds for an answer without data
MAX_KNOWN = 10_000
# names that protocols have for what changes with an object
CHANGES = ("ETag", "etag", *TIMES)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RemoteFile:
    """A file as its store describes it."""

    url: str
    num_bytes: int
    version: str  # changes with the file

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2].removesuffix(SUFFIX)


class RemoteLoras:
    """The files of one URL. Raises a LoraStoreError while it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._files, self._root = open_store(self.url)
        except StoreUrlError as error:
            raise LoraError(f"{url} cannot hold LoRAs: {error}") from None
        self._server = Backoff(self.url, PATIENCE)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, RemoteFile]] = OrderedDict()  # with the time at which it was told

    def find(self, name: str) -> RemoteFile | None:
        """The file of a LoRA; None if there is none. What was known of it counts while the store does not answer."""
        told_at, known = self._known.get(name, (-SECONDS_FRESH, None))
        if known and time.monotonic() - told_at < SECONDS_FRESH:
            return known
        try:
            return self._remember(name, self._ask(lambda: self._files.info(self._path(name))))
        except FileNotFoundError:
            self._forget(name)
            return None
        except LoraStoreError:
            if known:
                return known
            raise

    def list(self) -> list[RemoteFile]:
        try:
            found = self._ask(lambda: self._files.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        named = [(Path(about["name"]).name, about) for about in found if about.get("type") == "file"]
        return [self._remember(name.removesuffix(SUFFIX), about) for name, about in named if name.endswith(SUFFIX)]

    def open(self, file: RemoteFile) -> LoraFile:
        """Read what a file says about itself."""
        path = self._path(file.name)
        try:
            start = self._ask(lambda: self._files.cat_file(path, start=0, end=8))
            length = header_length(Path(path), start, file.num_bytes)
            content = self._ask(lambda: self._files.cat_file(path, start=8, end=8 + length), length)
        except FileNotFoundError:
            raise LoraError(f"the file of the LoRA {file.name!r} is gone") from None
        raw = RawHeader(Path(path), content, file.num_bytes - 8 - length)
        return LoraFile(parse_header(raw), {}, file.version)

    def copy(self, file: RemoteFile, target: Path) -> None:
        """Copy a file, which appears when it is complete."""
        with complete_file(target) as partial:
            try:
                self._ask(lambda: self._files.get_file(self._path(file.name), str(partial)), file.num_bytes)
            except FileNotFoundError:
                raise LoraError(f"the file of the LoRA {file.name!r} is gone") from None
            self._forget(file.name)
            present, num_bytes = self.find(file.name), partial.stat().st_size
            if present != file or num_bytes != file.num_bytes:
                raise LoraError(f"the file of the LoRA {file.name!r} has changed: send the edit again")

    def _ask(self, work: Callable[[], Answer], num_bytes: int = 0) -> Answer:
        try:
            return self._server.ask(work, num_bytes)
        except GoneError as error:
            raise LoraStoreError(f"the store of LoRAs {self.url} does not answer: {error}") from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{SUFFIX}"

    def _remember(self, name: str, about: dict[str, Any]) -> RemoteFile:
        url, num_bytes = f"{self.url}/{name}{SUFFIX}", int(about["size"])
        facts = [url, num_bytes, *(str(about[change]) for change in CHANGES if change in about)]
        file = RemoteFile(url, num_bytes, hashlib.sha256(repr(facts).encode()).hexdigest()[:16])
        with self._lock:
            self._known[name] = time.monotonic(), file
            self._known.move_to_end(name)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return file

    def _forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)


class LoraDisk:
    """Copies of remote LoRAs on this machine's disk, of so many bytes. Every copy is named by its version."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._stores: dict[str, RemoteLoras] = {}  # by URL

    def has(self, use: LoraUse) -> bool:
        return not use.url or os.path.exists(use.path)

    def bring(self, use: LoraUse) -> Path:
        """The path of a LoRA, whose file is copied if it is remote and not here. One process copies, others wait."""
        path = Path(use.path)
        if not use.url:
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    self._store(use).copy(remote_file(use), path)
                    self._make_room(path)
                os.utime(path)
        except OSError as error:
            raise LoraError(f"the file of the LoRA {use.name!r} cannot be copied: {error.strerror or error}") from error
        return path

    def look(self, use: LoraUse) -> LoraFile:
        """What a remote file says about itself."""
        return self._store(use).open(remote_file(use))

    def _store(self, use: LoraUse) -> RemoteLoras:
        url = use.url.rpartition("/")[0]
        if url not in self._stores:
            self._stores[url] = RemoteLoras(url)
        return self._stores[url]

    def _make_room(self, newest: Path) -> None:
        """Remove the least recently used copies until the rest fits. Whoever reads one at present has it open."""
        copies = sorted((path.stat().st_mtime, path) for path in newest.parent.glob(f"*{SUFFIX}") if path != newest)
        used = newest.stat().st_size + sum(path.stat().st_size for _, path in copies)
        for _, path in copies:
            if used <= self.max_bytes:
                return
            used -= path.stat().st_size
            for gone in (path, path.with_suffix(".lock")):
                with suppress(OSError):
                    gone.unlink()


def remote_file(use: LoraUse) -> RemoteFile:
    return RemoteFile(use.url, use.num_file_bytes, use.version)

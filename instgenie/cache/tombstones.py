"""Templates that were forgotten while a tier could not be asked: what that tier still has of them is not used, and is
deleted when the tier answers again. With a folder the list outlives the process."""

import contextlib
import logging
import threading
from pathlib import Path

from instgenie.jobs.activations import Key, parse_key
from instgenie.machine.files import complete_file

FORGOTTEN = "forgotten"  # folder beside the templates

logger = logging.getLogger(__name__)


class Tombstones:
    """Several processes may share a folder: a tombstone that one of them removes is gone for all."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder / FORGOTTEN if folder else None
        self._keys = set(read_keys(self.folder)) if self.folder else set()
        self._lock = threading.Lock()

    def __contains__(self, key: Key) -> bool:
        if key not in self._keys:
            return False
        if self.folder and not (self.folder / key.name).exists():
            self.remove(key)
            return False
        return True

    def all(self) -> list[Key]:
        with self._lock:
            keys = list(self._keys)
        return [key for key in keys if key in self]

    def add(self, key: Key) -> None:
        with self._lock:
            self._keys.add(key)
        if self.folder:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                with complete_file(self.folder / key.name, durable=True) as partial:
                    partial.write_text(key.text)
            except OSError as error:
                logger.warning("that a template is forgotten is not written down: %s", error)

    def remove(self, key: Key) -> None:
        with self._lock:
            if key not in self._keys:
                return
            self._keys.discard(key)
        if self.folder:
            with contextlib.suppress(OSError):
                (self.folder / key.name).unlink(missing_ok=True)
                self.folder.rmdir()  # if it is empty


def read_keys(folder: Path) -> list[Key]:
    keys = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                key = parse_key(path.read_text())
                if key.name == path.name:
                    keys.append(key)
    return keys

"""Memory that two processes of one user on one machine share. It has no name in any folder: it is gone when both have
ended, however they do."""

import mmap
import os
import sys

ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def can_share() -> bool:
    return sys.platform == "linux"


class OwnMemory:
    """Memory of this process that another one may open by its path. It grows and never shrinks."""

    def __init__(self) -> None:
        self._file = os.memfd_create("instgenie-residuals")
        self._map: mmap.mmap | None = None

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def num_bytes(self) -> int:
        return 0 if self._map is None else len(self._map)

    def reserve(self, num_bytes: int) -> memoryview:
        """Memory of at least so many bytes; views of it may live on after it has grown."""
        if self._map is None or len(self._map) < num_bytes:
            os.ftruncate(self._file, num_bytes)
            self._map = mmap.mmap(self._file, num_bytes)
        return memoryview(self._map)

    def close(self) -> None:
        os.close(self._file)


class ForeignMemory:
    """Memory of another process. Raises an OSError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR)
        self._map: mmap.mmap | None = None

    def read(self, num_bytes: int) -> memoryview:
        if self._map is None or len(self._map) < num_bytes:
            self._map = mmap.mmap(self._file, num_bytes)
        return memoryview(self._map)

    def close(self) -> None:
        os.close(self._file)

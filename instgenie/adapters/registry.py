"""The LoRAs that edits may name, and the files behind the names. Needs no torch.

Names come from four places: the server's options, which all tenants share; the files of a folder and those behind a
URL, which all tenants share, too; and requests, whose names belong to the tenant that sent them and stand for files of
the folder. A name of the tenant's own goes first, and a file of the folder before a remote one.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from instgenie.adapters.files import LoraFile, open_lora
from instgenie.adapters.fitting import fit
from instgenie.adapters.header import WeightsHeader
from instgenie.adapters.layers import LayerTable
from instgenie.adapters.remote import RemoteFile, RemoteLoras
from instgenie.errors import LoraError, LoraNotFoundError, LoraStoreError
from instgenie.types import LoraUse

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHARED = ""  # the tenant of names that all may use


@dataclass(frozen=True)
class RegisteredLora:
    name: str
    path: Path
    tenant: str
    file: LoraFile
    changed: tuple[int, int]  # size and time of the file when it was read
    remote: RemoteFile | None = None  # copied to the path by whoever needs it; None: the file is there
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def root(self) -> str:
        """The name of its file."""
        return self.remote.url.rpartition("/")[2] if self.remote else self.path.name

    @property
    def num_bytes(self) -> int:
        return self.file.header.num_bytes


class LoraRegistry:
    def __init__(
        self,
        modules: Mapping[str, str] | None = None,
        folder: str | None = None,
        url: str | None = None,
        disk_folder: str = "",
    ) -> None:
        """Raises a LoraError if a file of `modules` is no LoRA. Remote files are copied to the last folder."""
        self.folder = Path(folder).resolve() if folder else None
        self.remote, self.disk_folder = RemoteLoras(url) if url else None, Path(disk_folder)
        if self.folder and not self.folder.is_dir():
            raise LoraError(f"the folder of LoRAs {folder} does not exist")
        self.table: LayerTable | None = None  # of the model; None: not known yet, and nothing is fitted
        self._known: dict[tuple[str, str], RegisteredLora] = {}
        self._fitting: set[str] = set()  # versions of files that fit the model
        for name, path in (modules or {}).items():
            self._put(check_name(name), Path(path).resolve(), SHARED)

    @property
    def is_empty(self) -> bool:
        """True if no edit can ever name a LoRA."""
        return not self._known and self.folder is None and self.remote is None

    def add(self, name: str, path: str, tenant: str) -> RegisteredLora:
        """Give a name to a file of the folder, for one tenant."""
        check_name(name)
        if self.folder is None:
            raise LoraError("this server takes no LoRAs by request: it was started without --lora-dir")
        found = (self.folder / path).resolve()
        if not found.is_relative_to(self.folder) or found == self.folder:
            raise LoraError(f"the path {path!r} is not inside the folder of LoRAs")
        known = self._known.get((tenant, name))
        if known and known.path != found:
            raise LoraError(f"the name {name!r} is taken: DELETE it first")
        if not found.exists():
            raise LoraNotFoundError(f"the folder of LoRAs has no {path!r}")
        added = self._put(name, found, tenant)
        try:
            self._check(added)
        except LoraError:
            del self._known[tenant, name]
            raise
        return added

    def open(self, name: str, path: Path) -> RegisteredLora:
        """Give any name to any file, for all: where no requests come from others."""
        return self._put(name, path.resolve(), SHARED)

    def remove(self, name: str, tenant: str) -> None:
        """Take a name away that the tenant has given."""
        if (tenant, name) not in self._known or tenant == SHARED:
            shared = self._find(name, tenant)
            raise LoraError(f"the LoRA {shared.name!r} is the server's own and stays")
        del self._known[tenant, name]

    def find(self, name: str, tenant: str) -> RegisteredLora:
        """The LoRA of a name; raises a LoraNotFoundError, or a LoraError if its file does not fit the model."""
        found = self._find(name, tenant)
        self._check(found)
        return found

    def resolve(self, uses: Sequence[LoraUse], tenant: str) -> tuple[LoraUse, ...]:
        """The same uses with the files behind their names."""
        found = [(use, self.find(use.name, tenant)) for use in uses]
        return tuple(
            use._replace(
                path=str(one.path),
                version=one.file.version,
                num_bytes=one.num_bytes,
                url=one.remote.url if one.remote else "",
                num_file_bytes=one.remote.num_bytes if one.remote else 0,
            )
            for use, one in found
        )

    def list(self, tenant: str) -> list[RegisteredLora]:
        """All LoRAs that a tenant may name. Files of the folder that are no LoRAs are left out; remote files are not
        looked into."""
        for path in self._files():
            if (SHARED, path.stem) not in self._known and NAME.fullmatch(path.stem):
                try:
                    self._put(path.stem, path, SHARED)
                except LoraError:
                    continue
        seen = {one.name: one for one in self._list_remote()}
        seen |= {one.name: one for (owner, _), one in self._known.items() if owner == SHARED and is_there(one)}
        seen |= {one.name: one for (owner, _), one in self._known.items() if owner == tenant}
        return sorted(seen.values(), key=lambda one: one.name)

    def has(self, name: str, tenant: str) -> bool:
        """Return whether a name is known. Asks no server: a remote LoRA is known once it was named as one."""
        try:
            return self._find_here(name, tenant) is not None or (SHARED, name) in self._known
        except LoraError:
            return False

    def _find(self, name: str, tenant: str) -> RegisteredLora:
        found = self._find_here(name, tenant) or self._find_remote(name)
        if found is None:
            raise LoraNotFoundError(f"the LoRA {name[:128]!r} does not exist")
        return found

    def _find_here(self, name: str, tenant: str) -> RegisteredLora | None:
        """One whose file is on this machine; None: there is none, or a remote one."""
        known = self._known.get((tenant, name)) or self._known.get((SHARED, name))
        if known is None or known.remote:
            path = self._file_of(name)
            return self._put(name, path, SHARED) if path else None
        if not known.path.exists():
            del self._known[known.tenant, name]
            raise LoraNotFoundError(f"the file of the LoRA {name!r} is gone")
        return known if stamp(known.path) == known.changed else self._put(name, known.path, known.tenant)

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.folder.iterdir()) if self.folder else ():
            if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors"))):
                yield path

    def _file_of(self, name: str) -> Path | None:
        """A file or a folder of PEFT's, of this name."""
        if self.folder is None or not NAME.fullmatch(name):
            return None
        found = (self.folder / f"{name}.safetensors", self.folder / name)
        inside = (path for path in found if path.exists() and path.resolve().is_relative_to(self.folder))
        return next(inside, None)

    def _find_remote(self, name: str) -> RegisteredLora | None:
        found = self.remote.find(name) if self.remote and NAME.fullmatch(name) else None
        known = self._known.get((SHARED, name))
        if known and known.remote == found:
            return known
        self._known.pop((SHARED, name), None)
        if found is None or self.remote is None:
            return None
        self._known[SHARED, name] = self._describe_remote(found, self.remote.open(found))
        return self._known[SHARED, name]

    def _list_remote(self) -> Iterator[RegisteredLora]:
        """None while their store does not answer."""
        with suppress(LoraStoreError):
            for found in self.remote.list() if self.remote else ():
                if NAME.fullmatch(found.name):
                    header = WeightsHeader(Path(found.name), {}, found.num_bytes)
                    yield self._describe_remote(found, LoraFile(header, {}, found.version))

    def _describe_remote(self, found: RemoteFile, file: LoraFile) -> RegisteredLora:
        path = self.disk_folder / f"{found.version}.safetensors"
        return RegisteredLora(found.name, path, SHARED, file, (0, 0), found)

    def _put(self, name: str, path: Path, tenant: str) -> RegisteredLora:
        found = RegisteredLora(name, path, tenant, open_lora(path), stamp(path))
        self._known[tenant, name] = found
        return found

    def _check(self, lora: RegisteredLora) -> None:
        """Raise a LoraError unless the file fits the model."""
        if self.table is None or lora.file.version in self._fitting:
            return
        try:
            fit(lora.file.header, self.table, lora.file.settings)
        except LoraError as error:
            raise LoraError(f"the LoRA {lora.name!r} does not fit: {error}") from None
        self._fitting.add(lora.file.version)


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LoraError(
            f"the name {name!r} is not one for a LoRA: up to 128 letters, digits, dots, dashes and underscores are "
            "expected, a letter or a digit first"
        )
    return name


def is_there(lora: RegisteredLora) -> bool:
    return lora.remote is not None or lora.path.exists()


def stamp(path: Path) -> tuple[int, int]:
    """Tells a file from what it was before."""
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns

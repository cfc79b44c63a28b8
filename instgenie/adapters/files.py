"""LoRA files by path: a safetensors file, or a folder as PEFT saves it. Needs no torch."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instgenie.adapters.header import WeightsHeader, read_header
from instgenie.errors import LoraError

END_BYTES = 2**16
SETTINGS = "adapter_config.json"  # beside the weights, in a folder of PEFT's


@dataclass(frozen=True)
class LoraFile:
    """A file whose header is read and sound."""

    header: WeightsHeader
    settings: dict[str, Any]  # of PEFT; empty: the file stands alone
    version: str  # changes with the file

    @property
    def path(self) -> Path:
        return self.header.path


def open_lora(path: Path) -> LoraFile:
    """Read what a file says about itself, or raise a LoraError."""
    file, settings = locate(path)
    return LoraFile(read_header(file), settings, version_of(file, settings))


def locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file with the weights, and the settings beside it."""
    if not path.exists():
        raise LoraError(f"the file {path.name!r} does not exist")
    if not path.is_dir():
        return path, {}
    file = find_weights(path)
    return file, read_settings_file(file.parent / SETTINGS)


def version_of(file: Path, settings: dict[str, Any]) -> str:
    """A name for the content of a file, from its size, its time and its two ends: reading all of it would take longer
    than loading it."""
    facts = file.stat()
    named = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns} {sorted(settings.items(), key=str)}".encode())
    with open(file, "rb") as content:
        named.update(content.read(END_BYTES))
        content.seek(max(facts.st_size - END_BYTES, 0))
        named.update(content.read(END_BYTES))
    return named.hexdigest()[:16]


def find_weights(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise LoraError(f"the folder {folder.name!r} has {len(found)} safetensors files: one is expected")
    return found[0]


def read_settings_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LoraError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise LoraError(f"{path.name} is not an object of JSON")
    return settings

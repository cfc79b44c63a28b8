"""Result files: a bad path is found before anything is measured, and a file appears only when it is complete."""

import json
from pathlib import Path

from instgenie.errors import InstGenieError
from instgenie.machine.files import complete_file


def check_folder(path: Path | None) -> None:
    """Refuse a file whose folder does not exist."""
    if path and not path.parent.is_dir():
        raise InstGenieError(f"{path} cannot be written: there is no folder {path.parent}")


def write_text(text: str, path: Path) -> None:
    """Write the whole file or nothing."""
    with complete_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(report: object, path: Path) -> None:
    write_text(json.dumps(report, indent=2) + "\n", path)

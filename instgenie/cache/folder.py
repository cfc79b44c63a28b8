"""The folder of the disk tier: its default place, and the check that it can be used. Knows paths; imports no torch."""

import os
from pathlib import Path

from instgenie.errors import CacheError

PRIVATE = 0o700  # mode of folders that only their owner may enter


def default_folder() -> Path:
    """The folder inside the user's cache folder, by the XDG base directory specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise CacheError("there is no home folder to keep a cache in: name a folder for it") from None
    return home / "instgenie" / "templates"


def make_folder(folder: Path) -> Path:
    """Return the folder, made if necessary, with access for its owner only."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE, exist_ok=True)
    except OSError as error:
        raise CacheError(f"{folder} cannot be a cache folder: {error.strerror}") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise CacheError(f"{folder} cannot be a cache folder: reading and writing in it is not permitted")
    return folder

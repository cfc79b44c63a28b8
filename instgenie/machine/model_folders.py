"""The folders of models that are on this machine, by the names that users give them. Needs no torch."""

from pathlib import Path

BUILTIN = Path(__file__).parent.parent / "models" / "builtin"


def model_folder(name: str) -> Path:
    """The folder of `builtin`, or the one that the name is; it may not exist."""
    return BUILTIN if name == "builtin" else Path(name)

"""Mask-guided image editing. Importing the package does not import torch; the first use of `Editor` does."""

from typing import TYPE_CHECKING, Any

from instgenie.errors import InstGenieError
from instgenie.types import Edit, Result

if TYPE_CHECKING:
    from instgenie.editor import Editor

__all__ = ["Edit", "Editor", "InstGenieError", "Result"]


def __getattr__(name: str) -> Any:
    if name == "Editor":
        from instgenie.editor import Editor

        return Editor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

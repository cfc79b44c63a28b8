"""What comes with a model and with the package for people to try: prompts the model knows, pictures to edit. Knows
files; no model."""

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from instgenie.server.monitoring.log import say

PACKAGE = Path(__file__).parents[2]
EXAMPLES = PACKAGE / "examples"


class Prompts(BaseModel):
    """`{colour}` in a prompt stands for any of the colours, or none."""

    colours: list[str] = []
    prompts: dict[str, list[str]] = {}  # by group


def known_prompts(model: str) -> Prompts:
    """Of the model's folder, if it has a list of them."""
    folder = PACKAGE / "models" / "builtin" if model == "builtin" else Path(model)
    path = folder / "prompts.json"
    if not path.is_file():
        return Prompts()
    try:
        return Prompts.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError):
        say("the model's prompts.json cannot be read", level=30)
        return Prompts()


def known_examples() -> list[dict[str, Any]]:
    """Name, mask, prompts and seed of each."""
    examples: list[dict[str, Any]] = tomllib.loads((EXAMPLES / "edits.toml").read_text())["edit"]
    return examples

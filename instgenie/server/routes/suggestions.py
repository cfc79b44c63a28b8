"""Suggestions for the edit page: prompts that suit the model, and example pictures to edit. Knows files; no model."""

import json
import tomllib
from typing import Any

from pydantic import BaseModel, ValidationError

from instgenie.machine.model_folders import model_folder
from instgenie.pictures.examples import EXAMPLES
from instgenie.server.monitoring.log import say


class Prompts(BaseModel):
    """`{colour}` in a prompt stands for one of the colours, or for nothing."""

    colours: list[str] = []
    prompts: dict[str, list[str]] = {}  # by group


def suggested_prompts(model: str) -> Prompts:
    """Read prompts.json in the model's folder; without such a file there are no suggestions."""
    path = model_folder(model) / "prompts.json"
    if not path.is_file():
        return Prompts()
    try:
        return Prompts.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError):
        say("the model's prompts.json cannot be read", level=30)
        return Prompts()


def suggested_examples() -> list[dict[str, Any]]:
    """Return name, picture, mask, prompts and seed of each example."""
    examples: list[dict[str, Any]] = tomllib.loads((EXAMPLES / "edits.toml").read_text())["edit"]
    return examples

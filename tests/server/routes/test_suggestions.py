"""Prompts that come with a model. A broken list of prompts does not stop the server."""

import json
from pathlib import Path

import pytest

from instgenie.machine.model_folders import BUILTIN
from instgenie.server.routes.suggestions import Prompts, suggested_prompts


def test_every_word_of_a_prompt_is_one_the_model_knows() -> None:
    words = json.loads((BUILTIN / "tokenizer_2" / "tokenizer.json").read_text())["model"]["vocab"]
    found = suggested_prompts("builtin")
    texts = [*found.colours, *(prompt.replace("{colour}", "") for group in found.prompts.values() for prompt in group)]
    assert len(texts) > 50
    assert {word for text in texts for word in text.lower().split()} <= set(words)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"colours": 1}', '{"prompts": {"cats": "cat"}}'])
def test_a_broken_list_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "prompts.json").write_text(content)
    assert suggested_prompts(str(tmp_path)) == Prompts()


def test_a_model_without_a_list_has_none(tmp_path: Path) -> None:
    assert suggested_prompts(str(tmp_path)) == suggested_prompts("owner/name") == Prompts()

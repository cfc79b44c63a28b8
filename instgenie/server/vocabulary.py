"""The words that a model knows. Models with a vocabulary of whole words read any other word as the same unknown token
and draw the prompt without it; tokenizers that split words know them all. Knows a tokenizer's file; imports no
tokenizer."""

import json
import re

from instgenie.machine.model_folders import model_folder
from instgenie.server.errors import echo

SEPARATORS = re.compile(r"[^a-z0-9\- ]+")
MAX_NAMED = 5
# Words that nobody misses in a picture: a prompt without them is the same prompt.
SMALL_WORDS = frozenset(
    {
        "a", "an", "and", "at", "by", "for", "from", "in", "into", "is", "its",
        "of", "on", "or", "over", "some", "that", "the", "this", "to", "under", "with",
    }
)  # fmt: skip


class Vocabulary:
    """The words of a model; None: it may know every word."""

    def __init__(self, words: frozenset[str] | None) -> None:
        self.words = words

    def unknown(self, prompt: str) -> list[str]:
        """Return the words of a prompt that the model does not know, each once."""
        if self.words is None:
            return []
        words = SEPARATORS.sub(" ", prompt.lower()).split()
        return list(dict.fromkeys(word for word in words if word not in self.words))

    def notes(self, prompt: str) -> list[str]:
        unknown = self.unknown(prompt)
        if not unknown:
            return []
        named = ", ".join(echo(word) for word in unknown[:MAX_NAMED])
        rest = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        return [f"The model does not know {named}{rest}: the prompt was drawn without."]


def read_vocabulary(model: str) -> Vocabulary:
    """Read the vocabulary of a model's folder, if its tokenizer knows whole words only."""
    path = model_folder(model) / "tokenizer" / "tokenizer.json"
    try:
        tokens = json.loads(path.read_bytes())["model"]
        is_of_words = tokens["type"] == "WordLevel"
        words = frozenset(word for word in tokens["vocab"] if not word.startswith("<"))
    except (OSError, ValueError, KeyError, TypeError):
        return Vocabulary(None)
    if not is_of_words or not words:  # a tokenizer without a single word is a stand-in
        return Vocabulary(None)
    return Vocabulary(words | SMALL_WORDS)

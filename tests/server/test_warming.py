"""A server with the built-in model: examples are registered ahead, unknown words are named, time left is predicted."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.serving import Running, running_server, wait_for

from instgenie.pictures.examples import EXAMPLES
from instgenie.server.routes.suggestions import suggested_examples
from instgenie.server.vocabulary import Vocabulary, read_vocabulary


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("builtin")) as running:
        yield running


def test_the_first_edit_of_an_example_finds_its_activations(builtin: Running) -> None:
    first = suggested_examples()[0]
    files = {name: (EXAMPLES / first[key]).read_bytes() for name, key in (("image", "picture"), ("mask", "mask"))}
    with builtin.http(None) as client:
        wait_for(lambda: any(one["state"] == "ready" for one in client.get("/v1/templates").json()["data"]))
        fields = {"prompt": f"{first['prompts'][0]} with a zeppelin", "stream": "true", "stream_progress": "true"}
        answer = client.post("/v1/images/edits", files=files, data=fields)
        assert client.get("/page/facts").json()["warmed"]["num"] == len(suggested_examples())
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in data]
    *_, sending, done = events
    assert done["cache_tier"] is not None
    assert sending["type"] == "instgenie.sending"
    assert sending["num_bytes"] > len(done["b64_json"])
    left = [event["seconds_left"] for event in events if event["type"] == "instgenie.step"]
    assert left
    assert all(seconds > 0 for seconds in left[:-1])
    assert left[0] > left[-1]
    assert "The model does not know 'zeppelin': the prompt was drawn without." in done["notes"]


def test_unknown_words() -> None:
    words = read_vocabulary("builtin")
    assert words.unknown("A photo of a Siamese cat, with a Zeppelin and a zeppelin!") == ["zeppelin"]
    assert Vocabulary(None).unknown("anything") == []
    [note] = words.notes("qa qb qc qd qe qf qg")
    assert note.startswith("The model does not know 'qa', 'qb', 'qc', 'qd', 'qe' and 2 more")


def test_a_tokenizer_that_splits_words_knows_them_all(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 1}}}')
    assert read_vocabulary(str(tmp_path)).words is None

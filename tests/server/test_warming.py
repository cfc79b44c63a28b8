"""A server with the built-in model: examples are registered ahead, unknown words are named, time left is predicted."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.serving import MASK, PICTURE, Running, pixels_of, running_server, wait_for

from instgenie.pictures.examples import EXAMPLES
from instgenie.server.routes.suggestions import suggested_examples
from instgenie.server.vocabulary import Vocabulary, read_vocabulary

FIELDS = {"stream": "true", "stream_progress": "true"}


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("builtin")) as running:
        yield running


def test_the_first_edit_of_an_example_finds_its_activations(builtin: Running) -> None:
    first = suggested_examples()[0]
    files = {name: (EXAMPLES / first[key]).read_bytes() for name, key in (("image", "picture"), ("mask", "mask"))}
    with builtin.http(None) as client:
        wait_for(lambda: any(one["state"] == "ready" for one in client.get("/v1/templates").json()["data"]))
        assert client.get("/page/facts").json()["warmed"]["num"] == len(suggested_examples())
        assert builtin.metric("instgenie:cache_hits_total") == 0
        with client.stream("POST", "/v1/images/edits", files=files, data=FIELDS | {"prompt": "a cat"}) as answer:
            next(line for line in answer.iter_lines() if "instgenie.step" in line)  # the rest would be more of the same
    assert builtin.metric("instgenie:cache_hits_total") == 1


def test_it_offers_its_own_adapters(builtin: Running) -> None:
    fields = {"prompt": "a cat", "num_inference_steps": "2", "reuse": "off", "lora": "pencil"}
    fields |= {"controls": json.dumps([{"name": "edges", "image": "canny"}])}
    with builtin.http(None) as client:
        assert [one["id"] for one in client.get("/v1/loras").json()["data"]] == ["pencil", "teal"]
        assert {"builtin", "edges", "pencil", "teal"} == {one["id"] for one in client.get("/v1/models").json()["data"]}
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["loras"]["from_step"] == 0
    assert any("'edges'" in note for note in answer.json()["notes"])


def test_it_removes_from_noise_unless_a_strength_is_given(builtin: Running) -> None:
    fields = {"prompt": "background", "num_inference_steps": "2", "reuse": "off", "seed": "1"}
    starts: list[dict[str, str]] = [{}, {"masked_content": "surroundings"}]
    starts.append(starts[1] | {"strength": "0.5"})
    with builtin.http(None) as client:
        files = {"image": PICTURE, "mask": MASK}
        answers = [client.post("/v1/images/edits", files=files, data=fields | start) for start in starts]
    from_noise, removed, half = map(pixels_of, answers)
    assert np.array_equal(from_noise, removed)
    assert not np.array_equal(half, removed)


def test_a_stream_tells_the_time_left_the_bytes_to_come_and_unknown_words(server: Running) -> None:
    with server.http() as client:
        fields = FIELDS | {"prompt": "a cat with a zeppelin", "num_inference_steps": "4"}
        answer = client.post("/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=fields)
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in data]
    *_, sending, done = events
    assert sending["type"] == "instgenie.sending"
    assert sending["num_bytes"] > len(done["b64_json"])
    left = [event["seconds_left"] for event in events if event["type"] == "instgenie.step"]
    assert len(left) == 4
    assert all(seconds > 0 for seconds in left[:-1])
    assert left[0] > left[-1]
    [unknown] = [note for note in done["notes"] if note.startswith("The model does not know")]
    assert "'zeppelin'" in unknown


def test_unknown_words() -> None:
    words = read_vocabulary("builtin")
    assert words.unknown("A photo of a Siamese cat, with a Zeppelin and a zeppelin!") == ["zeppelin"]
    assert words.notes("a cat with a zeppelin") == ["The model does not know 'zeppelin': the prompt was drawn without."]
    assert Vocabulary(None).unknown("anything") == []
    [note] = words.notes("qa qb qc qd qe qf qg")
    assert note.startswith("The model does not know 'qa', 'qb', 'qc', 'qd', 'qe' and 2 more")


def test_a_tokenizer_that_splits_words_knows_them_all(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 1}}}')
    assert read_vocabulary(str(tmp_path)).words is None

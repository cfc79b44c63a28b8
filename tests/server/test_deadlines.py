"""Deadlines, priorities and shares of keys over HTTP, on a server of one worker whose batch has room for two edits."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.serving import ALICE, BOB, Running, edit, running_server, wait_for


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    keys = folder / "keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    flags = ("--api-key-file", str(keys), "--max-batch-size", "2", "--max-queue-per-key", "5", "--slo-scale", "1000",
             "--tenant-weight", "bob=2", "--no-auto-register")  # fmt: skip
    with running_server(folder, str(folders["sd"]), *flags) as running:
        yield running


def num_steps(server: Running) -> float:
    return server.metric("instgenie:step_time_seconds_count")


def test_an_answer_says_what_was_predicted_and_whether_it_was_in_time(shared: Running) -> None:
    [picture] = edit(shared).data
    assert picture.predicted_ms > 0
    assert picture.in_time is True  # the server's default is a thousand times what it takes
    assert picture.num_preemptions == 0


def test_a_hopeless_edit_is_refused_at_once_with_the_prediction(shared: Running) -> None:
    before = num_steps(shared)
    with pytest.raises(openai.APIStatusError, match=r"predicted to take \d+ ms, but \d+ ms of its deadline") as refused:
        edit(shared, extra_body={"num_inference_steps": 999, "deadline_ms": 1500, "on_late": "reject"})
    assert (refused.value.status_code, refused.value.code) == (408, "deadline_unreachable")
    assert num_steps(shared) == before
    assert edit(shared, extra_body={"deadline_ms": 60_000, "on_late": "reject"}).data[0].in_time


def test_an_edit_that_would_be_late_is_finished_in_full_unless_the_client_wants_otherwise(shared: Running) -> None:
    for given in ({}, {"on_late": "run"}):
        before = num_steps(shared)
        answer = edit(shared, extra_body={"deadline_ms": 1, "num_inference_steps": 8} | given)
        [picture] = answer.data
        assert (picture.in_time, num_steps(shared) - before) == (False, 8)
        assert picture.b64_json
        assert not any("late" in note for note in answer.notes)


def test_an_edit_that_would_be_late_is_made_cheaper_and_the_answer_says_so(shared: Running) -> None:
    before = num_steps(shared)
    answer = edit(shared, extra_body={"deadline_ms": 1, "num_inference_steps": 48, "on_late": "degrade"})
    [picture] = answer.data
    assert (picture.in_time, num_steps(shared) - before) == (False, 16)
    [note] = [note for note in answer.notes if "late" in note]
    assert "16 of 48 steps" in note


def test_a_key_has_its_own_part_of_the_queue(shared: Running) -> None:
    with pytest.raises(openai.RateLimitError, match="0 edits of this API key, 5 are allowed, and the request has 6"):
        edit(shared, n=6)


def test_one_key_that_floods_the_server_does_not_keep_another_waiting(shared: Running) -> None:
    """Each edit of the quiet key is done while the flood, which came first, still runs."""
    ended: list[Any] = []

    def flood() -> None:
        ended.append(edit(shared, key=ALICE, n=3, extra_body={"num_inference_steps": 120}))

    noisy = threading.Thread(target=flood)
    noisy.start()
    wait_for(lambda: shared.metric("instgenie:num_requests_running") >= 2)
    for _ in range(3):
        [picture] = edit(shared, key=BOB, extra_body={"num_inference_steps": 3}).data
        assert picture.in_time
        assert not ended
    noisy.join()
    assert len(ended[0].data) == 3
    assert shared.metric("instgenie:deadlines_total") >= 1
    assert shared.metric("instgenie:prediction_error_ratio") >= 0

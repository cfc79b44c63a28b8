"""Log lines of the HTTP process in both formats."""

import json
import logging
from collections.abc import Iterator

import pytest

from instgenie.server.monitoring.log import LEVELS, LogFormat, begin_request, note_jobs, say, set_up_log


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Leave the loggers as they were."""
    kept = {name: vars(logging.getLogger(name)).copy() for name in LEVELS}
    yield
    for name, state in kept.items():
        vars(logging.getLogger(name)).update(state)


def lines(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of a request before and after it has a job, and of another request's job meanwhile."""
    set_up_log(log_format)
    begin_request("req_1")
    say("answered", status=200)
    note_jobs(["job_1", "job_2"])
    say("answered", status=200)
    say("finished", job="job_9", request_id="req_9")
    return capsys.readouterr().err.splitlines()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (line.split(maxsplit=2)[1:] for line in lines("text", capsys))
    assert first == ["INFO", "answered status=200 request_id=req_1"]
    assert second == ["INFO", "answered status=200 request_id=req_1 jobs=['job_1', 'job_2']"]
    assert third == ["INFO", "finished job=job_9 request_id=req_9"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = map(json.loads, lines("json", capsys))
    assert (first["message"], first["status"], first["request_id"]) == ("answered", 200, "req_1")
    assert "jobs" not in first
    assert second["jobs"] == ["job_1", "job_2"]
    assert (third["job"], third["request_id"]) == ("job_9", "req_9")
    assert "jobs" not in third

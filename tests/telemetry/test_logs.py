"""Log lines are JSON."""

import json
import logging

import pytest

from instgenie.telemetry.logs import log_to_stderr


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("instgenie")


def test_lines_are_json(logger: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    before = logger.handlers, logger.level, logger.propagate
    try:
        log_to_stderr(worker_process="0.denoise.1")
        logging.getLogger("instgenie.x").info("two\nlines", extra={"job": "abc", "seconds": 1.5})
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("instgenie.x").exception("failed")
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["message"], first["job"], first["seconds"]) == ("two\nlines", "abc", 1.5)
    assert (first["level"], first["logger"], first["worker_process"]) == ("info", "instgenie.x", "0.denoise.1")
    assert first["time"].endswith("Z")
    assert "ValueError: no" in second["error"]

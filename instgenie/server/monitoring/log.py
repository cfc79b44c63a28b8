"""Log lines of the HTTP process, as JSON or as plain text. Each line of a request carries its id and those of its jobs;
keys, prompts, queries and pictures are never logged."""

import logging
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Literal

from instgenie.telemetry.logs import STANDARD, JsonFormatter, request_id

LogFormat = Literal["json", "text"]

job_ids: ContextVar[list[str] | None] = ContextVar("job_ids", default=None)  # of the request's edits
log = logging.getLogger("instgenie.server")

# loggers whose lines are written; a library that is missing here would write its warnings in a format of its own
LEVELS = {"instgenie": logging.INFO, "uvicorn": logging.WARNING, "python_multipart": logging.WARNING}


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {name: value for name, value in vars(record).items() if name not in STANDARD}
        shown = " ".join(f"{name}={value}" for name, value in facts.items())
        line = f"{time.strftime('%H:%M:%S')} {record.levelname:<7} {record.getMessage()} {shown}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def begin_request(id: str) -> None:
    """Have the lines that follow in this context carry the ids of a request and of its jobs."""
    request_id.set(id)
    job_ids.set([])  # tasks of the request share the list


def note_jobs(ids: Iterable[str]) -> None:
    jobs = job_ids.get()
    if jobs is not None:
        jobs.extend(ids)


def add_names(record: logging.LogRecord) -> bool:
    """Add the ids of the request and of its jobs, unless the line is about another job."""
    if request_id.get() and not hasattr(record, "job"):
        record.request_id = request_id.get()
        if job_ids.get():
            record.jobs = job_ids.get()
    return True


def set_up_log(log_format: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_names)
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def say(message: str, level: int = logging.INFO, **facts: Any) -> None:
    log.log(level, message, extra=facts)

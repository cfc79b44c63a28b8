"""Logs as JSON lines on stderr: time, level, logger, message, and the extra fields of a record. A line about an edit or
a registration names its request and its job."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Protocol

STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}  # attributes of any record
request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the HTTP request that is being answered


class Named(Protocol):
    """Work that a request asked for."""

    @property
    def id(self) -> str: ...

    @property
    def request_id(self) -> str: ...


def names_of(work: Named) -> dict[str, Any]:
    """The fields of a log line about the work. Work that no request asked for has no request id."""
    return {"job": work.id} | ({"request_id": work.request_id} if work.request_id else {})


class JsonFormatter(logging.Formatter):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= self.fields | {"message": record.getMessage()}
        line |= {name: value for name, value in vars(record).items() if name not in STANDARD}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str = "INFO", **fields: Any) -> None:
    """Log the package's records to stderr; every line carries the given fields."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(**fields))
    logger = logging.getLogger("instgenie")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False

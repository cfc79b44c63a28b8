"""Log lines of the HTTP process, as JSON or as plain text. Each line of a request carries its id; keys, prompts,
queries and pictures are never logged."""

import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal

from instgenie.telemetry.logs import STANDARD, JsonFormatter

LogFormat = Literal["json", "text"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
log = logging.getLogger("instgenie.server")

# loggers whose lines are written; a library that is missing here would write its warnings in a format of its own
LEVELS = {"instgenie": logging.INFO, "uvicorn": logging.WARNING, "python_multipart": logging.WARNING}


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {name: value for name, value in vars(record).items() if name not in STANDARD}
        shown = " ".join(f"{name}={value}" for name, value in facts.items())
        line = f"{time.strftime('%H:%M:%S')} {record.levelname:<7} {record.getMessage()} {shown}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def add_request_id(record: logging.LogRecord) -> bool:
    if request_id.get():
        record.request_id = request_id.get()
    return True


def set_up_log(log_format: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_request_id)
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def say(message: str, level: int = logging.INFO, **facts: Any) -> None:
    log.log(level, message, extra=facts)

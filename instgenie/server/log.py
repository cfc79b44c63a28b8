"""Log lines of the HTTP process: JSON, or text for people. Knows the request at hand by its id; never logs a key, a
prompt, a query or a picture."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["json", "text"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
log = logging.getLogger("instgenie")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"id": request_id.get()} if request_id.get() else {}
        facts |= getattr(record, "facts", {})
        shown = " ".join(f"{name}={value}" for name, value in facts.items())
        line = f"{time.strftime('%H:%M:%S')} {record.levelname:<7} {record.getMessage()} {shown}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_log(log_format: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("instgenie", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "instgenie" else logging.WARNING)


def say(message: str, level: int = logging.INFO, **facts: Any) -> None:
    log.log(level, message, extra={"facts": facts})

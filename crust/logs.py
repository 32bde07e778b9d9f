"""Logging: the standard library, one JSON and one console format, both to standard error.

Messages are constant; variable data goes into `extra`. The formatters add the fields of `context`, e.g. the request
id of the call that is being served. An error of crust in `extra` becomes two fields: its sentence in `error` and its
name in `error_name`; `code` is gRPC's. `crust.rpc.redaction` decides what a log line may show of a protobuf message.
"""

import contextvars
import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

from crust import errors

Format = Literal["json", "console"]

context: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "context", default=None
)
"""Fields that are added to every line within this context, e.g. the request id."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """The `extra` of a log call, with the context's fields."""
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    error = fields.get("error")
    if isinstance(error, errors.CrustError):
        fields |= {"error": str(error), "error_name": error.error_name}
    return {**(context.get() or {}), **fields}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """For a person at a terminal: time, level, message, key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        fields = " ".join(f"{key}={_plain(value)}" for key, value in extra_of(record).items())
        head = (
            f"{self.formatTime(record, '%H:%M:%S')} {record.levelname[:4]:4} {record.getMessage()}"
        )
        line = f"{head}  {fields}" if fields else head
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: object) -> str:
    """Keep it on one line: the text of a peer must not look like a line of crust's log."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def configure(*, level: str = "info", fmt: Format = "console", stream: TextIO = sys.stderr) -> None:
    """Set up the root logger; each process calls this once, at its start."""
    handler = logging.StreamHandler(stream)
    formatter: logging.Formatter = JsonFormatter() if fmt == "json" else ConsoleFormatter()
    if fmt == "json":
        formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())

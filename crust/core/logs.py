"""Logging: the standard library, one JSON and one console format, both to standard error.

Messages are constant; variable data goes into `extra`. The formatters add the fields of `context`, e.g. the request
id of the call that is being served. An error of crust in `extra` becomes two fields: its sentence in `error` and its
name in `error_name`; `code` is gRPC's. `crust.rpc.messages.redaction` decides which fields of a protobuf message a
log line may show, and `crust.core.credentials` hides credentials in any text.

Where standard error is the journal, each line begins with its priority.

Lines are formatted by the caller and written by a thread: a reader of standard error that stops reading (a full pipe)
must not stop the event loop, and with it every CSI call of the node. Lines that do not fit into the queue are dropped
and counted: a metric shows the number at once, and the log says it as soon as it can be written again.
"""

import contextvars
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from crust.core import credentials, errors

Format = Literal["json", "console"]

context: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "context", default=None
)
"""Fields that are added to every line within this context: of the call that is being served."""

QUEUE_BYTES = 4 << 20
"""The lines that may wait for their reader."""

_BATCH_BYTES = 64 << 10
_TRACEBACK_MAX_CHARS = 64 << 10
_FLUSH_S = 2.0
_PRIORITIES = (
    (logging.CRITICAL, "<2>"),
    (logging.ERROR, "<3>"),
    (logging.WARNING, "<4>"),
    (logging.INFO, "<6>"),
    (logging.NOTSET, "<7>"),
)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """The `extra` of a log call, with the context's fields."""
    own = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    error = own.get("error")
    if isinstance(error, errors.CrustError):
        own["error_name"] = error.error_name
    fields: dict[str, Any] = {**(context.get() or {}), **own}
    for key, value in fields.items():
        if isinstance(value, str | BaseException):  # the text of an error may come from any program
            fields[key] = credentials.shown(str(value))
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": credentials.shown(record.getMessage()),
            **extra_of(record),
        }
        if record.exc_info:
            line["traceback"] = credentials.hidden(
                self.formatException(record.exc_info)[-_TRACEBACK_MAX_CHARS:]
            )
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """For a person at a terminal: time, level, message, key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without a newline."""
        texts = {key: str(value) for key, value in extra_of(record).items()}
        # on one line: the text of a peer must not look like a line of crust's log
        fields = " ".join(
            f"{key}={text if text.isprintable() else repr(text)}" for key, text in texts.items()
        )
        message = credentials.shown(record.getMessage())
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname[:4]:4} {message}"
        line = f"{head}  {fields}" if fields else head
        if record.exc_info:
            line += f"\n{credentials.hidden(self.formatException(record.exc_info)[-_TRACEBACK_MAX_CHARS:])}"
        return line


class JournalFormatter(logging.Formatter):
    """Another formatter's lines, each with the priority that the journal reads from it (sd-daemon(3))."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, without the last newline."""
        prefix = next(text for level, text in _PRIORITIES if record.levelno >= level)
        return "\n".join(prefix + line for line in self._lines.format(record).splitlines())


class QueuedHandler(logging.Handler):
    """Writes lines to a descriptor in a thread of its own. `emit` never waits for the reader.

    `on_drop` is called for each line that is dropped, by the thread that logs it.
    """

    def __init__(self, fd: int, on_drop: Callable[[], None]) -> None:
        super().__init__()
        self._fd = fd
        self._on_drop = on_drop
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self.waiting_bytes = 0
        """The lines that are not written yet."""
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Format the record here, because the context's fields are the caller's, and queue the line.

        If a library's arguments do not fit its message, the line names the place without them: they may hold
        credentials.
        """
        try:
            text = self.format(record)
        except Exception as err:
            place = f"{record.pathname}:{record.lineno}"
            fields = {"name": record.name, "levelno": logging.ERROR, "levelname": "ERROR"}
            message = {"msg": "a log call failed", "place": place, "error": type(err).__name__}
            text = self.format(logging.makeLogRecord(fields | message))
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            fits = self.waiting_bytes + len(line) <= QUEUE_BYTES
            if fits:
                self._lines.append(line)
                self.waiting_bytes += len(line)
                self._changed.notify_all()
            else:
                self._dropped += 1
        if not fits:
            self._on_drop()

    def flush(self) -> None:
        """Wait until all lines are written, for a limited time: `logging` calls it when the process exits."""
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting_bytes, _FLUSH_S)

    def _write_all(self) -> None:
        while True:
            batch: list[bytes] = []
            size_bytes = 0
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                while self._lines and size_bytes < _BATCH_BYTES:
                    batch.append(self._lines.popleft())
                    size_bytes += len(batch[-1])
                # reported after the last lines of the queue, after which they were dropped
                dropped = 0 if self._lines else self._dropped
                self._dropped -= dropped
            self._write(b"".join(batch))
            if dropped:
                fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                message = {"msg": "log lines dropped: their reader was too slow", "lines": dropped}
                self._write(self.format(logging.makeLogRecord(fields | message)).encode() + b"\n")
            with self._changed:
                self.waiting_bytes -= size_bytes
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        """Write it all. A descriptor that cannot be written has no reader, so no error is raised."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has made the shared descriptor non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return


def waiting_bytes() -> int:
    """The lines of this process that wait for their reader."""
    handlers = logging.getLogger().handlers
    return sum(handler.waiting_bytes for handler in handlers if isinstance(handler, QueuedHandler))


def configure(
    *,
    level: str = "info",
    fmt: Format = "console",
    stream: TextIO | None = None,
    on_drop: Callable[[], None] = lambda: None,
) -> None:
    """Set up the root logger; each process calls this once, at its start. The default stream is standard error.

    A stream in memory, which never blocks, is written at once.
    """
    stream = stream or sys.stderr
    try:
        handler: logging.Handler = QueuedHandler(stream.fileno(), on_drop)
    except io.UnsupportedOperation:
        handler = logging.StreamHandler(stream)
    formatter: logging.Formatter = JsonFormatter() if fmt == "json" else ConsoleFormatter()
    if fmt == "json":
        formatter.converter = time.gmtime
    if isinstance(handler, QueuedHandler):
        # JOURNAL_STREAM is the device and inode of the journal's descriptor (systemd.exec(5))
        status = os.fstat(stream.fileno())
        if os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            formatter = JournalFormatter(formatter)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())

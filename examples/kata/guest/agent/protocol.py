"""The agent's protocol: one JSON object per line, both ways, over a virtio-serial port.

    host  -> guest   {"id": "...", "op": "statfs", "args": {...}}
    guest -> host    {"id": "...", "ok": {...}}  or  {"id": "...", "error": {"code", "message", "hint"}}
    guest -> host    {"event": "output" | "exit", ...}

A line has at most MAX_LINE bytes; a longer one is dropped up to its newline and answered as `bad_request`.
Requests are served concurrently and answered in any order. Version 2: `health` is about one volume, and `own`
applies an fsGroup in pieces. The host's side of this file is
examples/kata/vm/agent.py, which uses `Lines` too.
"""

from __future__ import annotations

import errno
import json
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_LINE = 256 * 1024
VERSION = 2
# virtio-blk carries 20 bytes of serial number (VIRTIO_BLK_ID_BYTES), and it names a directory here.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}\Z")

_BY_ERRNO = {
    errno.EBUSY: "busy",
    errno.EEXIST: "conflict",
    errno.EINVAL: "bad_request",
    errno.EIO: "io_error",
    errno.ELOOP: "refused",
    errno.EMFILE: "exhausted",
    errno.ENODEV: "unsupported",
    errno.ENOENT: "not_found",
    errno.ENOMEM: "exhausted",
    errno.ENOSPC: "exhausted",
    errno.ENOTDIR: "not_found",
    errno.EROFS: "read_only",
    errno.EUCLEAN: "corrupt",
    errno.EXDEV: "refused",
}


class Fault(Exception):
    """A failure to answer with: a code, the problem, and the remedy."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(code, message, hint)
        self.code = code
        self.message = message
        self.hint = hint


def fault_of(err: OSError, doing: str) -> Fault:
    """Translate an OSError met while `doing` something."""
    number = err.errno or 0
    code = _BY_ERRNO.get(number, "io_error")
    name = errno.errorcode.get(number, str(number))
    where = f" ({os.fsdecode(err.filename)})" if isinstance(err.filename, str | bytes) else ""
    return Fault(code, f"{doing} failed{where}: {err.strerror} [{name}]")


class Lines:
    """Splits a stream into lines; yields None in place of a line that is too long."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Add `data` and yield each line that it completes, without its newline; skips empty lines."""
        self._pending += data
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            if self._skipping or end > MAX_LINE:
                self._skipping = False
                yield None
            elif line:
                yield line
        if len(self._pending) > MAX_LINE:
            self._pending.clear()
            self._skipping = True

    def reset(self) -> None:
        """Drop a partial line: its writer has disconnected."""
        self._pending.clear()
        self._skipping = False


class Args:
    """The arguments of a request, read with their types checked; every failure is a `bad_request`."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise Fault("bad_request", "args is not an object")
        self._values = values
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """A name: 1 to 20 letters, digits, `_` or `-`."""
        value = self.text(key)
        if not _NAME.match(value):
            raise Fault("bad_request", f"{key} is not a name of 1 to 20 letters, digits, _ or -")
        return value

    def text(self, key: str, default: str | None = None, limit: int = 4096) -> str:
        """A string without NUL."""
        value = self._take(key, default)
        if not isinstance(value, str) or len(value) > limit or "\0" in value:
            raise Fault("bad_request", f"{key} is not a string of at most {limit} characters")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer within bounds, both included."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Fault("bad_request", f"{key} is not an integer from {low} to {high}")
        return value

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise Fault("bad_request", f"{key} is not true or false")
        return value

    def texts(self, key: str, limit: int = 256) -> list[str]:
        """A list of strings; empty if absent."""
        return [Args({"item": v}).text("item", limit=65536) for v in self._list(key, limit)]

    def integers(self, key: str, limit: int = 64) -> list[int]:
        """A list of ids (0 to 2^32-2); empty if absent."""
        return [Args({"item": v}).integer("item", 0, 2**32 - 2) for v in self._list(key, limit)]

    def objects(self, key: str, limit: int = 64) -> list[Args]:
        """A list of objects; empty if absent."""
        return [Args(v) for v in self._list(key, limit)]

    def optional(self, key: str) -> Args | None:
        """An object, or None if it is absent or null."""
        value = self._values.get(key)
        self._read.add(key)
        return None if value is None else Args(value)

    def end(self) -> None:
        """Refuse keys that were not read: a misspelt option must not be silently ignored."""
        unknown = sorted(self._values.keys() - self._read)
        if unknown:
            raise Fault("bad_request", f"unknown arguments: {', '.join(unknown)[:200]}")

    def _list(self, key: str, limit: int) -> list[Any]:
        value = self._take(key, [])
        if not isinstance(value, list) or len(value) > limit:
            raise Fault("bad_request", f"{key} is not a list of at most {limit} items")
        return value

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value


def encode(message: dict[str, Any]) -> bytes:
    """One line; a message that would be too long becomes an error with the same id."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) <= MAX_LINE:
        return line
    error = {"code": "exhausted", "message": "the answer does not fit a line", "hint": ""}
    return encode({"id": message.get("id"), "error": error})

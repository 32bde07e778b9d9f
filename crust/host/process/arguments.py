"""The arguments of a process, and the processes that have given arguments."""

import os
from collections.abc import Iterator
from pathlib import Path

_BYTES = 64 * 1024


def having(*words: str) -> Iterator[int]:
    """The processes that have these words, one after the other, among their arguments."""
    sequence = "".join(f"\0{word}" for word in words).encode() + b"\0"
    for name in os.listdir("/proc"):
        if name.isdigit() and sequence in b"\0" + of(int(name)):
            yield int(name)


def of(pid: int) -> bytes:
    """The arguments of a process, each with a NUL after it; empty if it has ended."""
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            return file.read(_BYTES)
    except OSError:
        return b""


def command_of(pid: int) -> str:
    """The short name of a process, "?" when it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"

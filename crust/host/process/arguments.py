"""The arguments of a process, and the processes that have given arguments.

Only ENOENT and ESRCH say that a process has ended: arguments that cannot be read may be the ones that are looked for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from crust.core.printable import printable
from crust.host import answers
from crust.host.process import hidden

_BYTES = 64 * 1024


def having(*words: str) -> Iterator[int]:
    """The processes that have these words, one after the other, among their arguments. Raises `NotSeen`."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        if has(int(name), *words):
            yield int(name)


def has(pid: int, *words: str) -> bool:
    """Whether the process has these words, one after the other, among its arguments. Raises `NotSeen`."""
    sequence = "".join(f"\0{word}" for word in words).encode() + b"\0"
    return sequence in b"\0" + of(pid)


def of(pid: int) -> bytes:
    """The arguments of a process, each with a NUL after it; empty if it has ended. Raises `NotSeen`."""

    def arguments() -> bytes:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            return file.read(_BYTES)

    answer = answers.ask(f"the arguments of process {pid}", arguments, absent=hidden.ENDED)
    return answers.seen(answer) or b""


def command_of(pid: int) -> str:
    """The short name of a process, escaped because the process chooses it; "?" when it has ended, or is not seen."""
    comm = Path(f"/proc/{pid}/comm")
    match answers.ask(f"{comm}", lambda: comm.read_text(encoding="utf-8", errors="replace")):
        case answers.Present(name):
            return printable(name.removesuffix("\n"))
        case _:
            return "?"

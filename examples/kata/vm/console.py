"""The console of a VM and QEMU's error output, both of bounded size.

The guest decides how much it prints, and a log file would let it fill the host's disk. So both are named pipes: a
pipe without reader holds 64 KiB and then refuses more, and the reader keeps the last TAIL bytes. The pipes are in
the VM's directory, so a process that adopts the VM continues to read them.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from examples.kata.vm import faults

TAIL = 64 * 1024
_SHOWN = 1500


def prepare(directory: Path) -> None:
    """Create the pipes."""
    for name in ("console.in", "console.out", "qemu.err"):
        os.mkfifo(directory / name, 0o600)


class _Follower:
    """The output of a console that one reader has not had yet: at most TAIL bytes, of a slow reader the last ones."""

    def __init__(self) -> None:
        self.pending = bytearray()
        self.changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        """Output that is new."""
        self.pending += data
        del self.pending[:-TAIL]
        self.changed.set()


class Console:
    """Keeps the end of the output of a VM and its QEMU. Create it on the event loop."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._tails: dict[int, bytearray] = {}
        self._followers: set[_Follower] = set()
        for name in ("console.out", "qemu.err"):
            # Read-write, so that opening does not wait for a writer and QEMU's end is not an endless end of file.
            fd = os.open(directory / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._tails[fd] = bytearray()
            self._loop.add_reader(fd, self._read, fd)

    def tail(self) -> str:
        """The last lines, QEMU's own last, short enough for an error message."""
        for fd in self._tails:
            self._read(fd)
        ends = (bytes(t[-_SHOWN:]).decode(errors="replace") for t in self._tails.values())
        return " | ".join(shown for end in ends if (shown := _last_lines(end)))

    def text(self) -> str:
        """The kept output of the guest's console."""
        first, *_ = self._tails
        self._read(first)
        return self._tails[first].decode(errors="replace")

    async def pieces(self, *, follow: bool) -> AsyncIterator[bytes]:
        """The kept output of the guest's console; with `follow` also later output, until the console is closed."""
        first, *_ = self._tails
        self._read(first)
        follower = _Follower()
        follower.add(bytes(self._tails[first]))
        self._followers.add(follower)
        try:
            while True:
                if follower.pending:
                    data = bytes(follower.pending)
                    follower.pending.clear()
                    yield data
                if not (follow and self._tails):
                    return
                follower.changed.clear()
                if not follower.pending:
                    await follower.changed.wait()
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        """Stop reading; idempotent."""
        for fd in self._tails:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._tails.clear()
        for follower in self._followers:
            follower.changed.set()

    def _read(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 65536):
                self._tails[fd] += data
                del self._tails[fd][:-TAIL]
                if fd == next(iter(self._tails)):
                    for follower in self._followers:
                        follower.add(data)


def _last_lines(text: str) -> str:
    lines = [faults.printable(line) for line in text.splitlines()]
    return " / ".join(line for line in lines if line)[-_SHOWN:]

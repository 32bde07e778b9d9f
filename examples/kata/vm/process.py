"""QEMU as a process that outlives its parent: started in a session of its own, watched by pidfd, found again.

A process is identified by its pid file and by the uuid on its command line. The check opens a pidfd first and
reads the command line after it, so a reused pid is never treated as the VM. All functions block for microseconds to
milliseconds; callers on the event loop use a thread for `spawn`.
"""

import asyncio
import contextlib
import errno
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path


def spawn(argv: Sequence[str], pass_fds: Sequence[int], stderr: Path) -> int:
    """Start a program in its own session and return its pid; it inherits `pass_fds`, at the same numbers.

    posix_spawn starts 20 times faster than fork from a process with much memory, and duplicating a descriptor
    onto itself clears its close-on-exec flag. Raises OSError.
    """
    actions: list[tuple[object, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        # A full pipe refuses more output; it neither fills a disk nor blocks QEMU.
        (os.POSIX_SPAWN_OPEN, 2, str(stderr), os.O_RDWR | os.O_NONBLOCK, 0),
        *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in pass_fds),
    ]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    return os.posix_spawn(argv[0], list(argv), environment, file_actions=actions, setsid=True)


def find(pid_file: Path, identity: str) -> "Process | None":
    """The process that wrote `pid_file` and has `identity` on its command line; None if it has ended."""
    try:
        pid = int(pid_file.read_text())
        process = Process(pid)
    except (ValueError, FileNotFoundError, ProcessLookupError):
        return None
    if identity.encode() in _command_line(pid) and process.runs():
        return process
    process.close()
    return None


def _command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Process:
    """A running process, child or not. Raises ProcessLookupError if there is none of that pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._ended = False

    def runs(self) -> bool:
        """Whether it still runs; reaps a child that has ended."""
        if self._fd >= 0 and not self._ended and select.select([self._fd], [], [], 0)[0]:
            self._reap()
        return not self._ended

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; does nothing after the process has ended or `close` was called."""
        if self._fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    async def wait(self) -> None:
        """Wait until it has ended; returns at once after `close`."""
        if self._fd < 0 or self._ended:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # A descriptor of its own, because the loop allows one reader per descriptor.
        fd = os.dup(self._fd)
        loop.add_reader(fd, _settle, ended)
        try:
            await ended
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        self._reap()

    def close(self) -> None:
        """Release it; the process continues to run. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reap(self) -> None:
        self._ended = True
        try:
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        except OSError as err:
            if err.errno != errno.ECHILD:
                raise

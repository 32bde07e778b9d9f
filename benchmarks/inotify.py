"""Bare inotify(7): the lower bound for any library that watches a directory."""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Iterator

MOVED_TO = 0x80
CREATED = 0x100
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def times_of(directory: str, event: int) -> Iterator[asyncio.Queue[int]]:
    """A queue of the monotonic times, in nanoseconds, at which the event loop saw `event` in `directory`."""
    times: asyncio.Queue[int] = asyncio.Queue()
    fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0 or _libc.inotify_add_watch(fd, os.fsencode(directory), event) < 0:
        raise OSError(ctypes.get_errno(), "inotify(7) cannot be used")

    def read() -> None:
        now_ns = time.monotonic_ns()
        os.read(fd, 4096)
        times.put_nowait(now_ns)

    loop = asyncio.get_running_loop()
    loop.add_reader(fd, read)
    try:
        yield times
    finally:
        loop.remove_reader(fd)
        os.close(fd)

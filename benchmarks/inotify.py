"""Bare inotify(7): the lower bound for any library that watches a directory."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator

from crust.host.process import syscalls

MOVED_TO = 0x80
CREATED = 0x100


@contextlib.contextmanager
def times_of(directory: str, event: int) -> Iterator[asyncio.Queue[int]]:
    """A queue of the monotonic times, in nanoseconds, at which the event loop saw `event` in `directory`."""
    times: asyncio.Queue[int] = asyncio.Queue()
    fd = syscalls.inotify_init()
    syscalls.inotify_add_watch(fd, directory, event)

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

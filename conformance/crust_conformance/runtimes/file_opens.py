"""Opens that wait: another process opens a file of a directory only after the suite has looked.

So a case sees what the directory has between two steps of the runtime, and can change it there, without a race. The
kernel asks the suite by a permission event of fanotify(7). The event loop answers, so nothing in that loop may open a
file of the directory while a block of `paused` runs: it would wait for itself. Opens with O_PATH cause no event. When
this process ends the kernel answers all events itself.
"""

import asyncio
import ctypes
import errno
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLOEXEC, _NONBLOCK, _CLASS_CONTENT = 0x1, 0x2, 0x4
_MARK_ADD = 0x1
_OPEN_PERM, _ON_CHILD = 0x0001_0000, 0x0800_0000
_ALLOW = 1
_EVENT = struct.Struct("=IBBHQii")
_ANSWER = struct.Struct("=iI")
_BUFFER_BYTES = 4096
_ABSENT = (errno.ENOSYS, errno.EINVAL)
"""A kernel without fanotify, or without its permission events."""

_libc = ctypes.CDLL(None, use_errno=True)


def is_offered() -> bool:
    """Whether the kernel has such events. Raises `OSError` for every other answer of the kernel."""
    with tempfile.TemporaryDirectory(prefix="crust-") as directory:
        try:
            os.close(_marked(directory))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
    return True


@contextmanager
def paused(directory: str, look: Callable[[str], float]) -> Iterator[None]:
    """While the block runs: have each open of a file in the directory wait for `look`.

    `look` gets the path, and returns for how many seconds more the open waits. Raises `OSError`.
    """
    loop = asyncio.get_running_loop()
    fanotify = _marked(directory)

    def answer(event: int) -> None:
        os.write(fanotify, _ANSWER.pack(event, _ALLOW))
        os.close(event)
        waiting.pop(event).cancel()

    def on_events() -> None:
        data = os.read(fanotify, _BUFFER_BYTES)
        for start in range(0, len(data), _EVENT.size):
            *_, event, _ = _EVENT.unpack_from(data, start)
            pause_s = 0.0
            try:
                pause_s = look(os.readlink(f"/proc/self/fd/{event}"))
            finally:
                waiting[event] = loop.call_later(pause_s, answer, event)

    waiting: dict[int, asyncio.TimerHandle] = {}
    loop.add_reader(fanotify, on_events)
    try:
        yield
    finally:
        loop.remove_reader(fanotify)
        for event in list(waiting):
            answer(event)
        os.close(fanotify)


def _marked(directory: str) -> int:
    """A descriptor of the events. Raises `OSError`."""
    flags = _CLASS_CONTENT | _CLOEXEC | _NONBLOCK
    fanotify = _checked(_libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC))
    mask = ctypes.c_uint64(_OPEN_PERM | _ON_CHILD)
    try:
        _checked(_libc.fanotify_mark(fanotify, _MARK_ADD, mask, -1, os.fsencode(directory)))
    except BaseException:
        os.close(fanotify)
        raise
    return fanotify


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

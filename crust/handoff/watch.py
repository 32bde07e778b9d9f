"""A watch of the handoff directory: an event only means "scan again"; the result of the scan is the truth.

`Watch` yields a hint at the start, for each event, at least every `rescan_s` seconds, and when the kernel's event
queue overflowed. Hints coalesce: a slow reader gets one hint for any number of events.

Only the root is watched, not the entries: one inotify watch for any number of volumes. Entries appear and disappear
by a rename in the root; a writer of a file inside an entry touches the entry's directory, and the watch of the
root sees that. A sandbox that died causes no event; the next periodic scan finds it.

The root may be deleted and created again: before each scan the directory that is at its path then is watched, which
changes nothing for the one that is watched already.
"""

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Iterator
from typing import Self

from crust.handoff import layout
from crust.host.process import syscalls, workers

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

RESCAN_S = 5.0
"""The time between scans without an event. The first scan of 1,000 entries takes a tenth of a second, a later one at
rest less than a hundredth.
"""

_ATTRIB, _MOVED_FROM, _MOVED_TO, _DELETE, _DELETE_SELF = 0x4, 0x40, 0x80, 0x200, 0x400
_OVERFLOW = 0x4000

_TOUCHES = _ATTRIB | _DELETE | _DELETE_SELF
"""The events that runtimes cause, and the deletion of the root. None of opening and closing: each scan would cause
new ones, without end."""

_RENAMES = _MOVED_FROM | _MOVED_TO

_EVENT = struct.Struct("iIII")
"""struct inotify_event: watch, mask, cookie, length of the name that follows."""

_READ_BYTES = 64 << 10


class Watch:
    """Hints that something in the directory `root` may have changed. An async context manager and iterator.

    `touches_only` is for the process that publishes: it knows the entries that it renames itself. It finds renames by
    other processes at the next periodic scan.
    """

    def __init__(
        self, root: str, *, rescan_s: float | None = None, touches_only: bool = False
    ) -> None:
        self.root = root
        self._rescan_s = RESCAN_S if rescan_s is None else rescan_s
        self._events = _TOUCHES if touches_only else _TOUCHES | _RENAMES
        self._hint = asyncio.Event()
        self._inotify = -1

    async def __aenter__(self) -> Self:
        try:
            self._inotify = syscalls.inotify_init()
        except OSError as err:  # of inotify's limits
            self._warn(err)
        else:
            asyncio.get_running_loop().add_reader(self._inotify, self._read)
        await workers.run(self._follow_root)
        self._hint.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        descriptor, self._inotify = self._inotify, -1
        if descriptor >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        """Return when it is time to scan: at once if there was a hint since the last call."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rescan_s):
                await self._hint.wait()
        # Cleared before the caller scans: a change during the scan sets it again.
        self._hint.clear()
        await workers.run(self._follow_root)

    def notify(self) -> None:
        """Cause a hint."""
        self._hint.set()

    def _read(self) -> None:
        """Take the events that are there, and cause a hint unless all of them are of hidden names."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._inotify, _READ_BYTES)
            if not all(layout.is_hidden(name) for name in _names(data)):
                self.notify()

    def _follow_root(self) -> None:
        """Watch the directory that is now at the root's path. Blocks."""
        if self._inotify < 0:
            return
        try:
            syscalls.inotify_add_watch(self._inotify, self.root, self._events)
        except FileNotFoundError:  # a later scan finds it
            return
        except OSError as err:
            self._warn(err)

    def _warn(self, error: OSError) -> None:
        """Periodic scans still find every change."""
        _log.warning("cannot watch the directory", extra={"root": self.root, "error": error})


def _names(data: bytes) -> Iterator[str]:
    """The name of each event; empty for one of the root itself, and where the queue has overflowed."""
    at = 0
    while at < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        if mask & _OVERFLOW:
            _log.warning("events of the handoff directory were lost: its queue has overflowed")
        yield os.fsdecode(data[at : at + length].rstrip(b"\0"))
        at += length

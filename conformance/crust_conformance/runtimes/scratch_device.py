"""A block device in memory, for a volume of a case."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.host.block import loop, loopctl
from crust.host.process import syscalls


@dataclass(frozen=True, slots=True)
class ScratchDevice:
    """The device at `path`."""

    path: str
    _memory: int
    _fd: int

    def grow(self, size_bytes: int) -> None:
        """Make it larger, as a volume is expanded."""
        with syscalls.translating(f"cannot resize {self.path}"):
            os.ftruncate(self._memory, size_bytes)
            fcntl.ioctl(self._fd, loopctl.SET_CAPACITY)


@contextmanager
def blank(size_bytes: int) -> Iterator[ScratchDevice]:
    """A blank device, while the block runs.

    The kernel detaches it at its last close, so a killed process leaves no device.
    """
    with (
        syscalls.translating("cannot make a scratch device"),
        syscalls.closing(os.memfd_create("crust-scratch")) as memory,
    ):
        os.ftruncate(memory, size_bytes)
        number, configured = loop.configure(memory, loopctl.AUTOCLEAR, "crust-scratch")
        # not for writing: the process of such a descriptor would be a user of the device
        with syscalls.closing(configured):
            held = os.open(loopctl.ensure_node(number), os.O_RDONLY)
        with syscalls.closing(held):
            yield ScratchDevice(loopctl.ensure_node(number), memory, held)

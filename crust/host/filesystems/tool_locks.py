"""A lock per volume that lives as long as any program that a process of crust has started on the volume's device.

A process that is killed leaves its mkfs or e2fsck running, perhaps stuck on a slow disk, and not every one of them
holds the device exclusively: mkfs.btrfs writes through a plain descriptor. So each program inherits two descriptors:
a lock, and the open device. Nobody stages, publishes or gives back the volume until the last copy of the lock is
closed, and the kernel does not detach the device, so that no other volume gets it, until its last copy is.

One file of no size serves all volumes: a volume's lock is one byte of it, at an offset made from its id. The lock is
shared and the file open for reading only, because a confined program gets it too. That is enough: the file has one
owner at a time (the driver that has the pool, the proxy that has the run directory), so the question is never who
comes first, only whether anybody is left.
"""

import hashlib
import os
from dataclasses import dataclass

from crust.core import errors
from crust.host.files import ofdlocks
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

_OFFSET_BYTES = 7
"""A file offset has 63 bits."""


class ToolLock:
    """The lock of one volume. Programs inherit `fd`."""

    def __init__(self, fd: int, offset: int) -> None:
        self.fd = fd
        self._offset = offset

    def __enter__(self) -> "ToolLock":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error a program may be left: closing ends the lock only with the last copy."""
        try:
            if kind is None:
                # All programs have ended; a child of another volume that has not executed yet may have a copy.
                ofdlocks.unlock(self.fd, at=self._offset)
        finally:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class ToolLocks:
    """The locks of volumes, in the file `path`. Methods block."""

    path: Place

    def take(self, volume: str) -> ToolLock:
        """Lock the volume for the programs that are to run on it. Raises `VolumeInUseByTool`."""
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with oserrors.translating(f"cannot open {self.path}"):
            fd = os.open(self.path, flags, 0o600)
        try:
            _check_free(fd, volume)
            ofdlocks.hold_shared(fd, at=_offset_of(volume))
        except BaseException:
            os.close(fd)
            raise
        return ToolLock(fd, _offset_of(volume))

    def check_free(self, volume: str) -> None:
        """Raise `VolumeInUseByTool` if a program runs on the volume, and take nothing."""
        with oserrors.translating(f"cannot open {self.path}"):
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # no program was ever started
                return
        try:
            _check_free(fd, volume)
        finally:
            os.close(fd)


def _check_free(fd: int, volume: str) -> None:
    if ofdlocks.is_locked(fd, at=_offset_of(volume)):
        raise errors.PeerUnavailable.named(
            "VolumeInUseByTool",
            f"{volume} is still in use",
            why="a program that crust has started on it, mkfs or e2fsck, has not ended",
            hint="retry; if it never ends, check whether the disk hangs",
        )


def _offset_of(volume: str) -> int:
    return int.from_bytes(hashlib.sha256(volume.encode()).digest()[:_OFFSET_BYTES])

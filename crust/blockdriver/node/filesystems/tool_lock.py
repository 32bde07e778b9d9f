"""A lock per volume that lives as long as any program that this driver started on it.

A driver that is killed leaves its mkfs or e2fsck running, perhaps stuck on a slow disk, and not every one of them
holds the device exclusively: mkfs.btrfs writes through a plain descriptor. So each program inherits two descriptors:
a lock, and the open device. The next driver refuses to stage the volume until the last copy of the lock is closed,
and the kernel does not detach the device, so that no other volume gets it, until its last copy is.

One file of no size serves all volumes: a volume's lock is one byte of it, at an offset made from its id. The lock is
shared and the file open for reading only, because a confined program gets it too. That is enough: one driver has the
pool at a time, so the question is never who comes first, only whether anybody is left.
"""

import hashlib
import os
from dataclasses import dataclass

from crust import errors, volumes
from crust.host.files import ofdlocks
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

_OFFSET_BYTES = 7
"""A file offset has 63 bits."""


class VolumeInUseByTool(errors.OperationPending):
    """A program that an earlier driver process started on the volume still runs."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"{volume_id} is still in use",
            why="a program that an earlier driver process started on it, mkfs or e2fsck, has not ended",
            hint="retry; if it never ends, check whether the disk hangs",
        )
        self.volume_id = volume_id


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
    """The locks of a pool's volumes, in the file `path` on the pool. Methods block."""

    path: Place

    def take(self, volume_id: volumes.VolumeId) -> ToolLock:
        """Lock the volume for the programs that are to run on it. Raises `VolumeInUseByTool`."""
        offset = int.from_bytes(hashlib.sha256(volume_id.encode()).digest()[:_OFFSET_BYTES])
        with oserrors.translating(f"cannot open {self.path}"):
            flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o600)
        try:
            if ofdlocks.is_locked(fd, at=offset):
                raise VolumeInUseByTool(volume_id)
            ofdlocks.hold_shared(fd, at=offset)
        except BaseException:
            os.close(fd)
            raise
        return ToolLock(fd, offset)

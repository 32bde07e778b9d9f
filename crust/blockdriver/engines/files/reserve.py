"""A small reserve of disk space for the records of existing volumes.

A full pool is emptied by unpublishing and deleting volumes, and an unpublish begins with a write of a record. So a
small file beside the records gives its blocks to such writes when the disk is full. New volumes never get them.
"""

import os

from crust import errors
from crust.host.files import durable
from crust.host.files.held_directory import Place

_SIZE_BYTES = 256 * 1024


class Reserve:
    """The file at `path`, on the filesystem of the records."""

    def __init__(self, path: Place) -> None:
        self._path = path

    def publish(self, path: Place, data: bytes) -> None:
        """`durable.publish`, with the reserve's blocks if the disk is full."""
        try:
            durable.publish(path, data)
        except errors.Exhausted:
            if not self.spend():
                raise
            durable.publish(path, data)
            self.keep()

    def keep(self) -> None:
        """Fill the reserve again; if the disk is full now, the next call does."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _SIZE_BYTES)
            finally:
                os.close(fd)
        except OSError:
            return

    def spend(self) -> bool:
        """Free the reserve's blocks for the next write; whether there were any."""
        try:
            was_allocated = os.stat(self._path).st_blocks > 0
            os.unlink(self._path)
        except OSError:
            return False
        return was_allocated

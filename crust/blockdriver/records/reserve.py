"""A little room that is kept for the records of volumes that exist.

A full pool is emptied by unpublishing and deleting volumes, and an unpublish begins with a record that has to be
written. So a small file stands beside the records, and gives its blocks when there are no others. A new volume gets
none of them.
"""

import os

from crust import errors
from crust.host.files import durable

_SIZE_BYTES = 256 * 1024


class Reserve:
    """The file at `path`, on the filesystem of the records."""

    def __init__(self, path: str) -> None:
        self._path = path

    def publish(self, path: str, data: bytes) -> None:
        """`durable.publish`, with the room of the reserve where there is no other."""
        try:
            durable.publish(path, data)
        except errors.Exhausted:
            if not self.spend():
                raise
            durable.publish(path, data)
            self.keep()

    def keep(self) -> None:
        """Have the room again; where there is none at this moment, the next time will do."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _SIZE_BYTES)
            finally:
                os.close(fd)
        except OSError:
            return

    def spend(self) -> bool:
        """Give the room to whoever writes next; whether there was any."""
        try:
            has_room = os.stat(self._path).st_blocks > 0
            os.unlink(self._path)
        except OSError:
            return False
        return has_room

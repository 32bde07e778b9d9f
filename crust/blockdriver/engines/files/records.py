"""Records as files, replaced atomically and durably, each in the directory of what it describes (`directories`).

`save` compares under a lock of this process: one process has the pool (`DirectoryPool.lock`).

*Reserve.* A full pool is emptied by unpublishing and deleting volumes. An unpublish begins with the write of a
record, and a delete with a new name. So a small file beside the volumes gives its blocks to such changes when the
disk is full. New volumes never get them.
"""

import os
import threading
from collections.abc import Callable

from crust.blockdriver.engines.pool_store import RecordChanged
from crust.core import errors
from crust.host.files import durable, sparse
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

_SIZE_BYTES = 256 * 1024
_LOCKS = 64


class Reserve:
    """The file at `path`, on the filesystem of the pool."""

    def __init__(self, path: Place) -> None:
        self._path = path

    def change(self, change: Callable[[], None]) -> None:
        """Make a change, again with the reserve's blocks if the disk is full."""
        try:
            change()
        except errors.Exhausted:
            if not self._spend():
                raise
            change()
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

    def _spend(self) -> bool:
        """Free the reserve's blocks for the next change; whether there were any."""
        try:
            was_allocated = os.stat(self._path).st_blocks > 0
            os.unlink(self._path)
        except OSError:
            return False
        return was_allocated


class FileRecords:
    """The records of one kind, none larger than `limit_bytes`, written on a full disk too, by the `reserve`."""

    def __init__(self, directory: Place, file: str, reserve: Reserve, *, limit_bytes: int) -> None:
        """A record is the file "<id>/<file>" of the directory."""
        self._directory = directory
        self._file = file
        self._limit_bytes = limit_bytes
        self._reserve = reserve
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))

    def ids(self) -> tuple[str, ...]:
        """By a listing."""
        with oserrors.translating(f"cannot list {self._directory}"):
            names = os.listdir(self._directory)
        return tuple(each for each in names if not each.startswith(".") and self._has(each))

    def _has(self, key: str) -> bool:
        try:
            return sparse.exists(self._path(key))
        except errors.CrustError:  # which its reader is told, too
            return True

    def load(self, key: str) -> bytes | None:
        """The file's content. Raises `durable.UntrustedFile`, `durable.UnreadableFile`."""
        try:
            return durable.read(self._path(key), limit_bytes=self._limit_bytes)
        except errors.NotFound:
            return None

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Replace the file."""
        path = self._path(key)
        with self._locks[hash(key) % _LOCKS]:
            if self.load(key) != previous:
                raise RecordChanged(self.shown(key))
            self._reserve.change(lambda: durable.publish(path, data))

    def shown(self, key: str) -> str:
        """The path."""
        return str(self._path(key))

    def _path(self, key: str) -> Place:
        return self._directory / key / self._file

"""Records as files: one directory per kind, one file per record, replaced atomically and durably.

A file's name is the record's id, which was checked to be one of this pool's. `save` compares under a lock of this
process: one process has the pool (`DirectoryPool.lock`).

A small reserve of disk space for the records of existing volumes.

A full pool is emptied by unpublishing and deleting volumes, and an unpublish begins with a write of a record. So a
small file beside the records gives its blocks to such writes when the disk is full. New volumes never get them.
"""

import os
import threading
import time

from crust.blockdriver.engines.pool_store import RecordChanged
from crust.core import errors
from crust.host.files import durable
from crust.host.files.held_directory import Place
from crust.host.process import oserrors

_SUFFIX = ".json"
_LOCKS = 64


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


class FileRecords:
    """The records in `directory`, none larger than `limit_bytes`. What exists is written on a full disk too, by the
    `reserve`.
    """

    def __init__(self, directory: Place, reserve: Reserve, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._directory = directory
        self._reserve = reserve
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS))

    def open(self) -> None:
        """Create the directory, and remove the temporary files of a crash."""
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)
        self._reserve.keep()

    def ids(self) -> tuple[str, ...]:
        """The names of the files."""
        with oserrors.translating(f"cannot list {self._directory}"):
            names = os.listdir(self._directory)
        return tuple(each.removesuffix(_SUFFIX) for each in names if each.endswith(_SUFFIX))

    def load(self, key: str) -> bytes | None:
        """The file's content. Raises `durable.UntrustedFile`, `durable.UnreadableFile`."""
        try:
            return durable.read(self._path(key), limit_bytes=self._limit_bytes)
        except errors.NotFound:
            return None

    def save(self, key: str, data: bytes, *, previous: bytes | None) -> None:
        """Replace the file."""
        with self._locks[hash(key) % _LOCKS]:
            if self.load(key) != previous:
                raise RecordChanged(self.shown(key))
            publish = durable.publish if previous is None else self._reserve.publish
            publish(self._path(key), data)

    def remove(self, key: str, *, previous: bytes | None = None) -> None:
        """Unlink the file."""
        with self._locks[hash(key) % _LOCKS]:
            if previous is not None and self.load(key) not in (None, previous):
                raise RecordChanged(self.shown(key))
            durable.remove(self._path(key))
        self._reserve.keep()

    def age_s(self, key: str) -> float:
        """By the file's time."""
        path = self._path(key)
        with oserrors.translating(f"cannot stat {path}"):
            try:
                return max(time.time() - os.stat(path).st_mtime, 0.0)
            except FileNotFoundError:
                return 0.0

    def shown(self, key: str) -> str:
        """The path."""
        return str(self._path(key))

    def _path(self, key: str) -> Place:
        return self._directory / (key + _SUFFIX)


_SIZE_BYTES = 256 * 1024

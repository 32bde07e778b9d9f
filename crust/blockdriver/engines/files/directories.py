"""The volumes and snapshot sets of a pool: a directory for each, which appears in one step and goes in one step.

    volumes/<id>/volume.json, content.json, <id>.img        a volume
    snapshots/<id>/set.json, <snapshot id>.snap …           a single snapshot, or a group
    …/.new-<id>/                                            a volume or set being made: the same files, in any order
    …/.gone-<id>.<random>/                                  a removed volume or set, whose space is not free yet

The step is a rename, between a sync of the new content and a sync of the parent directory. So no process ever sees a
part of a volume or set, and after a crash the driver removes every directory with a dot before its name.

A volume or set exists while its record does. A directory without a record is not "half made": its record was lost,
and the driver neither replaces nor removes it.

`save` replaces a record atomically and durably. It compares under a lock of this process: one process has the pool
(`DirectoryPool.lock`). It writes a record of one sector in place, with one wait for the disk: a disk writes a sector
completely or not at all. It renames a larger record over the old record, with two waits.

*Reserve.* An operator empties a full pool by unpublishing and deleting volumes. An unpublish begins with the write of
a record, and a delete with a new name. So a small file beside the volumes gives its blocks to such changes when the
disk is full. New volumes never get them.

An id becomes a path only if it has the form of this pool's ids: the callers check that, and `image`, which the node
part calls with ids from a CO, refuses a name that could lead elsewhere.
"""

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.engines.pool_access import RecordChanged, RecordKind, check_file_name
from crust.blockdriver.engines.protocol import orphan_image
from crust.core import errors, volumes
from crust.host import answers
from crust.host.files import durable, listing
from crust.host.files.durable import Place
from crust.host.process import syscalls

_NEW, _GONE = ".new-", ".gone-"
_IMAGE = ".img"
RECORDS = {
    RecordKind.VOLUMES: "volume.json",
    RecordKind.CONTENT: "content.json",
    RecordKind.SNAPSHOTS: "set.json",
}

_RESERVE_BYTES = 256 * 1024
_SECTOR_BYTES = 512
_LOCKS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reserve:
    """The file at a path on the filesystem of the pool."""

    _path: Place

    def change(self, change: Callable[[], None]) -> None:
        """Make a change, again with the reserve's blocks if the disk is full."""
        try:
            change()
        except errors.Exhausted:
            with syscalls.translating(f"cannot free {self._path}"):
                try:
                    was_allocated = os.stat(self._path).st_blocks > 0
                    os.unlink(self._path)
                except FileNotFoundError:
                    was_allocated = False
            if not was_allocated:
                raise
            change()
            self.keep()

    def keep(self) -> None:
        """Fill the reserve again; if the disk is full now, the next call does. Another failure is in the log."""
        try:
            with syscalls.opened(
                self._path, f"cannot fill {self._path}", os.O_WRONLY | os.O_CREAT
            ) as fd:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
        except errors.Exhausted:
            return
        except errors.CrustError as err:
            _log.warning("the reserve for a full disk is not filled", extra={"error": err})


@dataclass(slots=True)
class Staged:
    """A volume or set that is being made at `path`, to be named `final`."""

    path: Place
    final: Place
    is_committed: bool = False

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Write the records, and name the directory, durably."""
        for kind, data in records.items():
            durable.write_staged(self.path / RECORDS[kind], data.ljust(_SECTOR_BYTES))
        durable.publish_directory(self.path, self.final)
        self.is_committed = True


@dataclass(frozen=True, slots=True)
class Directories:
    """The directories of the volumes or sets whose record is of that kind. `is_id`: whether a text is such an id in
    this pool. A removal on a full disk gets the blocks of the reserve.
    """

    directory: Place
    _kind: RecordKind
    is_id: Callable[[str], bool]
    _reserve: Reserve

    def open(self) -> None:
        """Remove volumes, sets and files that a crash left incomplete; the first step of a start.

        It syncs the names and records of a killed process: the driver relies on them from now on.
        """
        for name in self._names():
            home = self.directory / name
            if name.startswith((_NEW, _GONE)):
                _free(home)
            if not self.is_id(name):
                continue
            try:
                durable.remove_temporary_files(home)
                durable.sync_directory(home)
                for path in [home / record for record in RECORDS.values()]:
                    with (
                        syscalls.translating(f"cannot sync {path}"),
                        contextlib.suppress(FileNotFoundError),
                        syscalls.closing(
                            os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                        ) as fd,
                    ):
                        os.fdatasync(fd)
            except errors.CrustError as err:  # of this volume or set alone: its calls report it
                extra = {"directory": str(home), "error": err}
                _log.warning("a directory of the pool cannot be read", extra=extra)
        self._reserve.keep()

    def ids(self) -> frozenset[volumes.VolumeId]:
        """The ids that have a directory, with or without its files."""
        return frozenset(volumes.VolumeId(name) for name in self._names() if self.is_id(name))

    @contextmanager
    def making(self, volume_or_set_id: str) -> Iterator[Staged]:
        """A directory to fill and commit; without a commit it is removed. Raises OrphanImage."""
        final, path = self.directory / volume_or_set_id, self.directory / (_NEW + volume_or_set_id)
        if listing.exists(final):
            raise orphan_image(volume_or_set_id, f"the directory {final}")
        try:
            durable.make_staging(path, 0o700)
        except durable.PathAlreadyExists:  # of a call that failed or was killed
            _free(path)
            durable.make_staging(path, 0o700)
        staged = Staged(path, final)
        try:
            yield staged
        except Exception:
            try:
                # another one of its name, which a person put back, stays
                if listing.exists(path):
                    _free(path)
                elif not staged.is_committed:
                    # It was renamed, and the name may not be durable: a repeated call would find it, and answer.
                    self.remove(volume_or_set_id)
            except errors.CrustError as err:
                extra = {"directory": str(path), "error": err}
                _log.warning("a part of a failed creation stays", extra=extra)
            raise
        if not staged.is_committed:
            _free(path)

    def remove(self, volume_or_set_id: str) -> None:
        """Remove the name, durably, then free the space; without a record it removes no file."""
        present = self.directory / volume_or_set_id
        if not listing.exists(present / RECORDS[self._kind]):
            durable.sync_directory(self.directory)  # an earlier removal may have failed at that
            return
        removed = self.directory / f"{_GONE}{volume_or_set_id}.{secrets.token_hex(4)}"

        def rename() -> None:
            with syscalls.translating(f"cannot remove {present}"):
                os.rename(present, removed)

        self._reserve.change(rename)
        durable.sync_directory(self.directory)
        _free(removed)
        self._reserve.keep()

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """The ids of unfinished volumes and sets, also after a failed removal."""
        unsettled = [name for name in self._names() if name.startswith((_NEW, _GONE))]
        ids = {name.removeprefix(_NEW).removeprefix(_GONE).partition(".")[0] for name in unsettled}
        return tuple(map(volumes.VolumeId, ids))

    def settle(self, volume_or_set_id: str) -> None:
        """Remove an unfinished volume or set; a part that cannot be removed is in the log, and stays."""
        durable.sync_directory(self.directory)  # a removal may have failed at that
        for name in self._names():
            if name == _NEW + volume_or_set_id or name.startswith(f"{_GONE}{volume_or_set_id}."):
                _free(self.directory / name)

    def _names(self) -> list[str]:
        with syscalls.translating(f"cannot list {self.directory}"):
            return os.listdir(self.directory)


class VolumeDirectories(Directories):
    def image(self, volume_id: volumes.VolumeId, home: Place | None = None) -> Place:
        """The image of a volume, whether it exists or not; during its creation in the directory `home`."""
        check_file_name(volume_id)
        return (home or self.directory / volume_id) / (volume_id + _IMAGE)

    def look_at(self, volume_id: volumes.VolumeId) -> answers.Answer[os.stat_result]:
        """The file at the path of the image; of a link the link itself."""
        path = self.image(volume_id)
        return answers.ask(f"the image {path}", lambda: os.lstat(path), absent=(errno.ENOENT,))

    def is_image(self, name: str) -> bool:
        return name.endswith(_IMAGE) and self.is_id(name.removesuffix(_IMAGE))


@dataclass(frozen=True, slots=True)
class FileRecords:
    """The records of one kind, written on a full disk too. A record is the file "<id>/<file>" of the directory."""

    _directory: Place
    _file: str
    _reserve: Reserve
    _limit_bytes: int
    """The most that a record has."""
    _locks: tuple[threading.RLock, ...] = field(
        default_factory=lambda: tuple(threading.RLock() for _ in range(_LOCKS)), init=False
    )

    def ids(self) -> tuple[str, ...]:
        with syscalls.translating(f"cannot list {self._directory}"):
            names = os.listdir(self._directory)
        return tuple(name for name in names if not name.startswith("."))

    def load(self, key: str) -> bytes | None:
        """The record without the spaces of its sector. Raises `durable.UntrustedFile`, `durable.UnreadableFile`."""
        # a read beside a write in place could see a part of each record
        path = self._path(key)
        with self._locks[hash(key) % _LOCKS], durable.opened(path, os.O_RDONLY) as fd:
            return None if fd is None else self._read(fd, path)

    def save(self, key: str, data: bytes, *, previous: bytes) -> None:
        """Replace the record: it compares and writes the file that it has opened once."""
        path = self._path(key)
        with self._locks[hash(key) % _LOCKS], durable.opened(path, os.O_RDWR) as fd:
            if fd is None or self._read(fd, path) != previous:
                raise RecordChanged(self.shown(key))
            self._reserve.change(lambda: _replace(fd, path, data.ljust(_SECTOR_BYTES)))

    def _read(self, fd: int, path: Place) -> bytes:
        return durable.content(fd, path, limit_bytes=self._limit_bytes).rstrip(b" ")

    def shown(self, key: str) -> str:
        return str(self._path(key))

    def _path(self, key: str) -> Place:
        return self._directory / key / self._file


def _replace(fd: int, path: Place, data: bytes) -> None:
    """Write a sector in place of another one: neither name nor size changes, so it waits for no journal.

    It replaces a file with a second name, which may belong to a backup.
    """
    with syscalls.translating(f"cannot write {path}"):
        status = os.fstat(fd)
        if len(data) == status.st_size == _SECTOR_BYTES and status.st_nlink == 1:
            os.pwrite(fd, data, 0)
            os.fdatasync(fd)
            return
    durable.write_file(path, data)


def _free(directory: Place) -> None:
    """Remove a directory of files, if it exists; without a sync, because no code depends on it."""
    try:
        for name in os.listdir(directory):
            os.unlink(directory / name)
        os.rmdir(directory)
    except FileNotFoundError:
        return
    except OSError as err:
        extra = {"directory": str(directory), "error": err}
        _log.warning("the rest of a removed volume or snapshot stays for now", extra=extra)

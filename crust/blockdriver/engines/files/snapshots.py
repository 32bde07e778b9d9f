"""Snapshots and clones of volumes that are files: read-only files beside their record, cloned where possible.

    snapshots/<set id>/<snapshot id>.snap    mode 0400, and never opened for writing

On xfs and btrfs a copy shares its blocks with its source until one of them is written to. So two snapshots can be
compared by the positions of their blocks; on other filesystems the positions mean nothing.
"""

import contextlib

from crust.blockdriver.engines.files.directories import Directories, Staged
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import (
    Image,
    ImageMissing,
    NoChangeTracking,
    Region,
    SnapshotMissing,
)
from crust.core import errors
from crust.core.pool_ids import set_of
from crust.host.block import devices
from crust.host.files import extents, file_copy, sparse
from crust.host.files.held_directory import Place

_SUFFIX = ".snap"
_READ_ONLY = 0o400


class FileSnapshots:
    """The snapshots in the directories of their sets."""

    def __init__(self, directories: Directories) -> None:
        self.directories = directories
        self._blocks: dict[str, int] = {}
        self._clones: bool | None = None

    def open(self) -> None:
        """Settle the sets, and count their blocks."""
        self._clones = None
        self.directories.open()
        self._blocks = {
            each: _blocks_bytes(self.directories.directory / each)
            for each in self.directories.ids()
        }

    @property
    def by_reference(self) -> bool:
        """Whether the pool's filesystem clones files; tried once."""
        if self._clones is None:
            self._clones = file_copy.clones(self.directories.directory)
        return self._clones

    def blocks_bytes(self) -> int:
        """The bytes of all snapshots' blocks, which do not change after each was taken."""
        return sum(tuple(self._blocks.values()))

    def ids(self) -> frozenset[str]:
        """The ids of all snapshot files."""
        found: set[str] = set()
        for each in self.directories.ids():
            with contextlib.suppress(errors.NotFound):  # removed since
                found.update(sparse.names(self.directories.directory / each, _SUFFIX))
        return frozenset(found)

    def take(self, image: Image, copy: Place, volume_path: Place, device_path: str | None) -> None:
        """Copy a volume's file to `copy`, after writing back its device's page cache. Raises `ImageMissing`."""
        if device_path is not None:
            devices.sync(device_path)
        try:
            file_copy.copy(
                volume_path,
                copy,
                least_bytes=image.size_bytes,
                mode=_READ_ONLY,
                at_once=self.by_reference,
            )
        except errors.NotFound as err:
            raise ImageMissing(image.volume_id) from err

    def moved_on(self, copy: Place, volume_path: Place, device_path: str | None) -> bool:
        """Whether the file, after writing back its device's page cache, has other blocks than the copy."""
        if device_path is not None:
            devices.sync(device_path)
        return bool(extents.differing(copy, volume_path))

    def commit(self, set_id: str, staged: Staged, record: bytes) -> None:
        """Name the directory."""
        staged.commit({RecordKind.SNAPSHOTS: record})
        self._blocks[set_id] = _blocks_bytes(staged.final)

    def check(self, image: Image) -> None:
        """Raise `SnapshotMissing` if there is no such file."""
        if not sparse.exists(self._path(image)):
            raise SnapshotMissing(image.snapshot_id)

    def remove(self, set_id: str) -> None:
        """Take the directory's name away; absent is a success."""
        self.directories.remove(set_id)
        self._blocks.pop(set_id, None)

    def restore(self, image: Image, volume_path: Place, size_bytes: int) -> None:
        """Copy a snapshot to a volume's file. Raises `SnapshotMissing`."""
        try:
            file_copy.copy(
                self._path(image),
                volume_path,
                least_bytes=image.size_bytes,
                grow_to_bytes=size_bytes,
            )
        except errors.NotFound as err:
            raise SnapshotMissing(image.snapshot_id) from err

    def clone(
        self,
        source_path: Place,
        device_path: str | None,
        volume_path: Place,
        *,
        source_bytes: int,
        size_bytes: int,
    ) -> None:
        """Copy a volume's file to another volume's. Raises `NotFound`."""
        if device_path is not None:
            devices.sync(device_path)
        file_copy.copy(
            source_path,
            volume_path,
            least_bytes=source_bytes,
            grow_to_bytes=size_bytes,
            at_once=self.by_reference,
        )

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """The parts that are not holes."""
        try:
            return _regions(extents.allocated(self._path(image)))
        except errors.NotFound as err:
            raise SnapshotMissing(image.snapshot_id) from err

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """The parts that are different blocks of the pool."""
        if not self.by_reference:
            raise NoChangeTracking(
                f"the filesystem of {self.directories.directory} does not share blocks of files"
            )
        for image in (base, target):
            self.check(image)
        return _regions(extents.differing(self._path(base), self._path(target)))

    def _path(self, image: Image) -> Place:
        return copy_in(self.directories.directory / set_of(image.snapshot_id), image.snapshot_id)


def copy_in(directory: Place, snapshot_id: str) -> Place:
    """The file of a snapshot in the directory of its set, or of one that is being taken."""
    if not snapshot_id.replace("-", "").isalnum() or not snapshot_id.isascii():
        raise errors.InvalidRequest(f"{snapshot_id!r} cannot be the name of an image")
    return directory / (snapshot_id + _SUFFIX)


def _blocks_bytes(directory: Place) -> int:
    """One that cannot be looked at counts none."""
    try:
        return sum(sparse.allocations(directory).values())
    except errors.CrustError:
        return 0


def _regions(found: tuple[extents.Extent, ...]) -> tuple[Region, ...]:
    return tuple(Region(each.offset, each.length) for each in found)

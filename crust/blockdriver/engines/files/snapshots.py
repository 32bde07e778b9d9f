"""Snapshots and clones of volumes that are files: read-only files beside their records, cloned where possible.

    snapshots/<snapshot id>.snap    mode 0400, and never opened for writing

On xfs and btrfs a copy shares its blocks with its source until one of them is written to. So two snapshots can be
compared by the positions of their blocks; on other filesystems the positions mean nothing.
"""

from crust.blockdriver.engines.protocol import (
    Image,
    ImageMissing,
    NoChangeTracking,
    Region,
    SnapshotMissing,
)
from crust.core import errors
from crust.host.block import devices
from crust.host.files import durable, extents, file_copy, sparse
from crust.host.files.held_directory import Place

_SUFFIX = ".snap"
_READ_ONLY = 0o400


class FileSnapshots:
    """The snapshots in a directory, which must exist."""

    def __init__(self, directory: Place) -> None:
        self._directory = directory
        self._blocks: dict[str, int] = {}
        self._clones: bool | None = None

    def open(self) -> None:
        """Count the blocks of the snapshots."""
        self._clones = None
        self._blocks = {
            name.removesuffix(_SUFFIX): size
            for name, size in sparse.allocations(self._directory).items()
            if name.endswith(_SUFFIX)
        }

    @property
    def by_reference(self) -> bool:
        """Whether the pool's filesystem clones files; tried once."""
        if self._clones is None:
            self._clones = file_copy.clones(self._directory)
        return self._clones

    def blocks_bytes(self) -> int:
        """The bytes of all snapshots' blocks, which do not change after each was taken."""
        return sum(tuple(self._blocks.values()))

    def ids(self) -> frozenset[str]:
        """The ids of all snapshot files."""
        return frozenset(sparse.names(self._directory, _SUFFIX))

    def take(self, image: Image, volume_path: Place, device_path: str | None) -> None:
        """Copy a volume's file, after writing back its device's page cache. Raises `ImageMissing`."""
        if device_path is not None:
            devices.sync(device_path)
        try:
            file_copy.copy(
                volume_path,
                self._path(image),
                least_bytes=image.size_bytes,
                mode=_READ_ONLY,
                at_once=self.by_reference,
            )
        except errors.NotFound as err:
            raise ImageMissing(image.volume_id) from err
        durable.sync_directory(self._directory)
        self._blocks[image.snapshot_id] = sparse.allocated_bytes(self._path(image))

    def check(self, image: Image) -> None:
        """Raise `SnapshotMissing` if there is no such file."""
        if not sparse.exists(self._path(image)):
            raise SnapshotMissing(image.snapshot_id)

    def moved_on(self, image: Image, volume_path: Place, device_path: str | None) -> bool:
        """Whether the file, after writing back its device's page cache, has other blocks than the snapshot."""
        if device_path is not None:
            devices.sync(device_path)
        return bool(extents.differing(self._path(image), volume_path))

    def delete(self, image: Image) -> None:
        """Unlink the file; absent is a success."""
        sparse.remove(self._path(image))
        self._blocks.pop(image.snapshot_id, None)

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
                f"the filesystem of {self._directory} does not share blocks of files"
            )
        for image in (base, target):
            self.check(image)
        return _regions(extents.differing(self._path(base), self._path(target)))

    def _path(self, image: Image) -> Place:
        name = image.snapshot_id
        if not name.replace("-", "").isalnum() or not name.isascii():
            raise errors.InvalidRequest(f"{name!r} cannot be the name of an image")
        return self._directory / (name + _SUFFIX)


def _regions(found: tuple[extents.Extent, ...]) -> tuple[Region, ...]:
    return tuple(Region(each.offset, each.length) for each in found)

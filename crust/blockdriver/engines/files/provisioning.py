"""The controller's side of the files: it makes, grows, copies and removes volumes that are sparse files.

Nothing here needs a device; where a file has one, its page cache is written back before the file is read, and its
size or its removal is refused by it. Files that others keep in the same filesystem are not the pool's space.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.directories import Staged, VolumeDirectories, image_in
from crust.blockdriver.engines.files.snapshots import FileSnapshots, copy_in
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import (
    Image,
    ImageMissing,
    PoolSpace,
    Region,
    StillAttached,
)
from crust.core import errors, volumes
from crust.host.files import sparse
from crust.host.files.held_directory import Place

_LEAST_SPARE_BYTES = 64 * 1024**2
_LARGEST_FILE_BYTES = 16 * 1024**4 - 1024**2
"""The largest file of ext4 with 4 KiB blocks; a pool may be larger, a single file may not."""


class PoolNotUsable(errors.NotReady):
    """The directory of the images, or the loop driver, cannot be used."""

    def __init__(self, pool: str, why: str) -> None:
        super().__init__(
            "the block driver cannot serve volumes",
            why=f"{pool}: {why}",
            hint="repair it; the driver needs no restart",
        )
        self.pool = pool


@dataclass(frozen=True, slots=True)
class FileMaking:
    """A volume that is being made: its image is the file `image` in the `staged` directory."""

    staged: Staged
    image: Place
    directories: VolumeDirectories
    access: FileAccess
    snapshots: FileSnapshots

    def create(self, size_bytes: int) -> None:
        """A sparse file, which takes no space yet."""
        sparse.create(self.image, size_bytes)

    def restore(self, image: Image, size_bytes: int) -> None:
        """A copy of the snapshot's file."""
        self.snapshots.restore(image, self.image, size_bytes)

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        """A copy of the volume's file."""
        try:
            self.snapshots.clone(
                self.directories.image(source),
                self.access.device_path(source),
                self.image,
                source_bytes=source_bytes,
                size_bytes=size_bytes,
            )
        except errors.NotFound as err:
            raise ImageMissing(source) from err

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Name the directory."""
        self.staged.commit(records)


@dataclass(frozen=True, slots=True)
class FileTaking:
    """A set of snapshots that is being taken: read-only files in the `staged` directory."""

    set_id: str
    staged: Staged
    directories: VolumeDirectories
    access: FileAccess
    snapshots: FileSnapshots

    def take(self, image: Image) -> None:
        """A copy of the volume's file."""
        with _told_when_full(self.directories.directory, image.snapshot_id):
            self.snapshots.take(image, self._copy(image), *self._volume(image))

    def moved_on(self, image: Image) -> bool:
        """By the positions of the blocks: a write to a block shared with a snapshot goes to a new one."""
        return self.snapshots.moved_on(self._copy(image), *self._volume(image))

    def commit(self, record: bytes) -> None:
        """Name the directory."""
        with _told_when_full(self.directories.directory, self.set_id):
            self.snapshots.commit(self.set_id, self.staged, record)

    def _copy(self, image: Image) -> Place:
        return copy_in(self.staged.path, image.snapshot_id)

    def _volume(self, image: Image) -> tuple[Place, str | None]:
        """The volume's file, and its device."""
        volume_id = image.volume_id
        return self.directories.image(volume_id), self.access.device_path(volume_id)


class FileProvisioning:
    """Volumes in `directories`, with the loop devices that `access` knows of, and their `snapshots`."""

    def __init__(
        self, directories: VolumeDirectories, access: FileAccess, snapshots: FileSnapshots
    ) -> None:
        self.directories = directories
        self._pool = directories.directory
        self._access = access
        self._others_bytes = 0
        self.snapshots = snapshots

    @property
    def modes(self) -> frozenset[volumes.AccessMode]:
        """Single-node modes: the file is on this node. MULTI_NODE_READER_ONLY allows
        many nodes and asks for none: the topology says which node it is. ReadOnlyMany claims arrive so."""
        mode = volumes.AccessMode
        return frozenset({
            mode.SINGLE_NODE_WRITER, mode.SINGLE_NODE_READER_ONLY,
            mode.SINGLE_NODE_SINGLE_WRITER, mode.SINGLE_NODE_MULTI_WRITER, mode.MULTI_NODE_READER_ONLY,
        })  # fmt: skip

    @property
    def raw_modes(self) -> frozenset[volumes.AccessMode]:
        """The same."""
        return self.modes

    def open(self) -> None:
        """Settle volumes and snapshots, find the attached ones, and measure other files in the pool's filesystem."""
        self.directories.open()
        self._access.open()
        self.snapshots.open()
        space = sparse.space(self._pool)
        used_bytes = space.total_bytes - space.available_bytes
        images = (self.directories.image(each) for each in self.directories.ids())
        ours_bytes = self.snapshots.blocks_bytes() + sum(map(_blocks_bytes, images))
        self._others_bytes = max(used_bytes - ours_bytes, 0)

    def check(self) -> None:
        """Whether the pool takes writes and the kernel has loop devices."""
        if not os.path.isdir(self._pool):
            raise PoolNotUsable(str(self._pool), "the directory does not exist")
        if sparse.space(self._pool).readonly:
            raise PoolNotUsable(str(self._pool), "its filesystem is read-only")
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            raise PoolNotUsable("/dev/loop-control", "it is absent or not accessible")

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[FileMaking]:
        """In a directory without a name. Raises `PoolFull`."""
        with _told_when_full(self._pool, volume_id), self.directories.making(volume_id) as staged:
            image = image_in(staged.path, volume_id)
            yield FileMaking(staged, image, self.directories, self._access, self.snapshots)

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Take the directory's name away, unless a loop device still has the file: its writer would lose data."""
        attachment = self._access.attached(volume_id)
        if attachment is not None:
            raise StillAttached(volume_id, attachment.shown)
        self.directories.remove(volume_id)

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[FileTaking]:
        """In a directory without a name."""
        with self.snapshots.directories.making(set_id) as staged:
            yield FileTaking(set_id, staged, self.directories, self._access, self.snapshots)

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """Take the directory's name away."""
        self.snapshots.remove(set_id)

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """By the names of directories."""
        return self.directories.unsettled() + self.snapshots.directories.unsettled()

    def settle(self, thing_id: volumes.VolumeId) -> None:
        """Unlink the files; a removal is never taken back."""
        self.directories.settle(thing_id)
        self.snapshots.directories.settle(thing_id)

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """By the file's name: whose it is cannot be told."""
        if not sparse.exists(self.directories.image(volume_id)):
            raise ImageMissing(volume_id)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow the file, never shrink it; raises `PoolFull`, `ImageMissing`.

        One that is large enough is synced too: a process that was killed may have grown it and not synced it.
        """
        with _told_when_full(self._pool, volume_id):
            try:
                sparse.grow(self.directories.image(volume_id), size_bytes)
            except errors.NotFound as err:
                raise ImageMissing(volume_id) from err

    def maximum_bytes(self) -> int:
        """The largest possible file, whatever the free space: too little space is another error."""
        return _LARGEST_FILE_BYTES

    def space(self) -> PoolSpace:
        """The space of the pool's filesystem, without the other files that it had when the driver started."""
        space = sparse.space(self._pool)
        return PoolSpace(
            size_bytes=space.total_bytes - self._others_bytes,
            free_bytes=space.available_bytes,
            snapshot_bytes=self.snapshots.blocks_bytes(),
            spare_bytes=_spare_bytes(space.total_bytes - self._others_bytes),
        )

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The directories of the pool."""
        return self.directories.ids()

    def snapshot_ids(self) -> frozenset[str]:
        """The snapshot files of the pool."""
        return self.snapshots.ids()

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The file's apparent size."""
        try:
            return self.directories.size_bytes(volume_id)
        except errors.CrustError:
            return 0

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The file is none, or shorter than it was created."""
        try:
            present_bytes = self.directories.size_bytes(volume_id)
        except sparse.NotAnImage as err:
            return str(err)
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""

    def copies_at_once(self) -> bool:
        """True on xfs and btrfs."""
        return self.snapshots.by_reference

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The allocated bytes of the file; 0 where files are cloned."""
        return (
            0
            if self.copies_at_once()
            else sparse.allocated_bytes(self.directories.image(volume_id))
        )

    def check_snapshot(self, image: Image) -> None:
        """By the file's name."""
        self.snapshots.check(image)

    @property
    def is_used_elsewhere(self) -> bool:
        """A pool belongs to one node."""
        return False

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """The allocated parts of the snapshot's file."""
        return self.snapshots.allocated(image)

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """The parts that the two files do not share."""
        return self.snapshots.changed(base, target)


@contextmanager
def _told_when_full(pool: Place, what: str) -> Iterator[None]:
    try:
        yield
    except errors.Exhausted as err:
        available_bytes = sparse.space(pool).available_bytes
        raise errors.Exhausted.named(
            "PoolFull",
            f"no space for {what}",
            why=f"{pool} has {available_bytes} free bytes",
            hint="free space in it, or request a smaller volume",
        ) from err


def _blocks_bytes(image: Place) -> int:
    """One that cannot be looked at counts none."""
    try:
        return sparse.allocated_bytes(image)
    except errors.CrustError:
        return 0


def _spare_bytes(size_bytes: int) -> int:
    """1 % of the pool, at least 64 MiB: records, extent maps and the filesystem's metadata need it."""
    return max(size_bytes // 100, _LEAST_SPARE_BYTES)

"""The controller's side of the files: it makes, grows, copies and removes volumes that are sparse files.

No method needs a device; if a file has a device, the driver writes back its page cache before it reads the file, and
refuses the removal.

A snapshot is a read-only file (mode 0400), which the driver never opens for writing. On xfs and btrfs a copy shares
its blocks with its source until a write to either. So the positions of their blocks show whether two snapshots
differ; on other filesystems they do not.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.directories import Directories, Staged, VolumeDirectories
from crust.blockdriver.engines.files.own_blocks import OwnBlocks
from crust.blockdriver.engines.pool_access import RecordKind, check_file_name, set_of
from crust.blockdriver.engines.protocol import (
    MODES,
    Image,
    ImageMissing,
    NoChangeTracking,
    PoolSpace,
    SnapshotMissing,
    StillAttached,
)
from crust.blockdriver.host import btrfs, extents, file_copy, usage
from crust.core import errors, volumes
from crust.host.answers import NotSeen, seen
from crust.host.block import devices
from crust.host.files import listing, sparse
from crust.host.files.durable import Place
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

_SNAPSHOT = ".snap"
_READ_ONLY = 0o400
_LEAST_SPARE_BYTES = 64 * 1024**2
"""Records, extent maps and the filesystem's metadata need 1 % of the pool, and this at least."""
_IN_PLACE = ("ext4", "xfs", "tmpfs")
"""The filesystems that write over allocated blocks in place. btrfs is none of them, without copy-on-write either: a
snapshot shares extents, and one that is overwritten in part keeps all of its blocks."""
_LARGEST_FILE_BYTES = 16 * 1024**4 - 1024**2
"""The largest file of ext4 with 4 KiB blocks; a pool may be larger, a single file may not."""


class PoolNotUsable(errors.NotReady):
    def __init__(self, pool: str, why: str) -> None:
        super().__init__("the block driver cannot serve volumes", why=f"{pool}: {why}")


@dataclass(frozen=True, slots=True)
class NewFileVolume:
    """A volume during its creation: its image is the file `image` in a staged directory, which `commit` names."""

    pool: "FileProvisioning"
    volume_id: volumes.VolumeId
    image: Place
    commit: Callable[[Mapping[RecordKind, bytes]], None]

    def create(self, size_bytes: int) -> None:
        sparse.create(self.image, size_bytes, in_place=self.pool.access.is_btrfs)

    def allocate(self, size_bytes: int) -> None:
        """By fallocate(2)."""
        sparse.allocate(self.image, 0, size_bytes, is_clone=self.pool.copies_at_once())

    def restore(self, image: Image, size_bytes: int) -> None:
        self.pool.own_blocks.join(self.volume_id, set_of(image.snapshot_id))
        try:
            file_copy.copy(
                self.pool.snapshot(image),
                self.image,
                least_bytes=image.size_bytes,
                grow_to_bytes=size_bytes,
            )
        except errors.NotFound as err:
            raise SnapshotMissing(image.snapshot_id) from err

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        self.pool.own_blocks.join(self.volume_id, source)
        try:
            file_copy.copy(
                self.pool.written_back(source),
                self.image,
                least_bytes=source_bytes,
                grow_to_bytes=size_bytes,
                at_once=self.pool.copies_at_once(),
            )
        except errors.NotFound as err:
            raise ImageMissing(source) from err


@dataclass(frozen=True, slots=True)
class NewFileSnapshotSet:
    """A set of snapshots during its creation: read-only files in the `staged` directory."""

    pool: "FileProvisioning"
    set_id: str
    staged: Staged
    _copies: dict[str, str] = field(default_factory=dict)
    """The snapshot of each volume."""
    _added: list[int] = field(default_factory=list)
    """What the present copies add, once that was asked for."""

    def take(self, image: Image) -> None:
        self.pool.own_blocks.join(self.set_id, image.volume_id)
        with self.pool.naming_full_pool(image.snapshot_id):
            try:
                file_copy.copy(
                    self.pool.written_back(image.volume_id),
                    copy_in(self.staged.path, image.snapshot_id),
                    least_bytes=image.size_bytes,
                    mode=_READ_ONLY,
                    at_once=self.pool.copies_at_once(),
                )
            except errors.NotFound as err:
                raise ImageMissing(image.volume_id) from err
        self._copies[image.volume_id] = image.snapshot_id
        self._added.clear()

    def added_bytes(self) -> int:
        """By the places of the blocks. Raises `NotSeen`."""
        if not self._added:
            added_bytes = self.pool.own_blocks.added_bytes(self._files(self.staged.path))
            self._added.append(added_bytes)
        return self._added[0]

    def _files(self, home: Place) -> dict[str, Place]:
        return {volume: copy_in(home, snapshot) for volume, snapshot in self._copies.items()}

    def moved_on(self, image: Image) -> bool:
        """By the positions of the blocks: a write to a block shared with a snapshot goes to a new block."""
        copy = copy_in(self.staged.path, image.snapshot_id)
        differing = extents.differing(copy, self.pool.written_back(image.volume_id))
        return next(differing, None) is not None

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        added_bytes = self.added_bytes()
        with self.pool.naming_full_pool(str(self.staged.final)):
            self.staged.commit(records)
        self.pool.own_blocks.commit(self.set_id, self._files(self.staged.final), added_bytes)


class FileProvisioning:
    """Volumes in `directories`, with the loop devices that `access` knows of, and the `sets` of their snapshots."""

    modes = raw_modes = MODES
    is_used_elsewhere = False
    """A pool belongs to one node."""
    maximum_bytes = _LARGEST_FILE_BYTES
    """At any free space: too little space is another error."""

    def __init__(
        self, directories: VolumeDirectories, sets: Directories, access: FileAccess
    ) -> None:
        self.directories = directories
        self.sets = sets
        self._pool = directories.directory
        self.access = access
        self.own_blocks = OwnBlocks(
            directories, sets, access.attached_here, self.copies_at_once, lambda: access.is_btrfs
        )
        self._clones: bool | None = None

    def open(self) -> None:
        self.directories.open()
        self.sets.open()
        self.access.open()
        self._clones = None
        self.own_blocks.forget()

    def check_usable(self) -> None:
        """Whether the pool takes writes and the kernel has loop devices."""
        try:
            mount = mountinfo.holding(os.path.realpath(self._pool))
            why = usage.problem(mount) if mount is not None else ""
        except NotSeen as err:  # xfs answers nothing any more after an error on its device
            why = str(err)
        if not why and not listing.exists(self._pool):
            why = "the directory does not exist"
        if why or sparse.space(self._pool).readonly:
            raise PoolNotUsable(str(self._pool), why or "its filesystem is read-only")
        try:
            os.close(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC))
        except OSError as err:
            raise PoolNotUsable("/dev/loop-control", syscalls.reason(err)) from err

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[NewFileVolume]:
        """In a directory without a name. Raises `PoolFull`."""
        with (
            self.naming_full_pool(volume_id),
            self.own_blocks.changing(volume_id),
            self.directories.making(volume_id) as staged,
            self.own_blocks.making(volume_id, staged.path),
        ):
            image = self.directories.image(volume_id, staged.path)
            yield NewFileVolume(self, volume_id, image, staged.commit)

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove the directory's name, unless a loop device still has the file: its writer would lose data."""
        attachment = self.access.attached(volume_id)
        if attachment is not None:
            raise StillAttached(volume_id, attachment.shown)
        with self.own_blocks.changing(volume_id):
            self.directories.remove(volume_id)

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[NewFileSnapshotSet]:
        with (
            self.own_blocks.changing(set_id),
            self.sets.making(set_id) as staged,
            self.own_blocks.making(set_id, staged.path),
        ):
            yield NewFileSnapshotSet(self, set_id, staged)

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        with self.own_blocks.changing(set_id):
            self.sets.remove(set_id)

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        return self.directories.unsettled() + self.sets.unsettled()

    def settle(self, volume_or_set_id: volumes.VolumeId) -> None:
        """Unlink the files; it takes no removal back."""
        with self.own_blocks.changing(volume_or_set_id):
            self.directories.settle(volume_or_set_id)
            self.sets.settle(volume_or_set_id)

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """By the file's name alone: a file has no mark of its maker. Raises `ImageReplaced`."""
        self.access.check_image(volume_id)
        if not listing.exists(self.directories.image(volume_id)):
            raise ImageMissing(volume_id)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int, *, thick: bool = False) -> None:
        """Grow the file, never shrink it; raises `PoolFull`, `ImageMissing`.

        It syncs a file that is large enough, too: a killed process may have grown it without a sync.
        """
        image = self.directories.image(volume_id)
        with self.naming_full_pool(volume_id), self.own_blocks.changing(volume_id):
            try:
                present_bytes = sparse.size_bytes(image) if thick else size_bytes
                if present_bytes < size_bytes:
                    try:  # what is beyond the size; a killed process may have left blocks there
                        sparse.allocate(image, present_bytes, size_bytes)
                    except errors.Exhausted:
                        sparse.free_beyond_size(image)
                        raise
                sparse.grow(image, size_bytes)
            except errors.NotFound as err:
                raise ImageMissing(volume_id) from err

    def thick_obstacle(self) -> str:
        """By the filesystem: it must write over a file's blocks in place."""
        place = os.path.realpath(str(self._pool))
        mount = mountinfo.holding(place)
        fs_type = mount.fs_type if mount is not None else "unknown"
        if fs_type in _IN_PLACE:
            return ""
        return f"the filesystem of {place} is {fs_type}, and only {', '.join(_IN_PLACE)} keep a file's blocks"

    def space(self) -> PoolSpace:
        """The space of the pool's filesystem. Raises `NotSeen` where the pool itself is not seen."""
        before_bytes = self._free_bytes()
        counted = self.own_blocks.count()
        # a write or a discard meanwhile must not count as free and as own
        free_bytes = min(before_bytes, self._free_bytes())
        return PoolSpace(
            free_bytes=free_bytes,
            own_bytes=counted.own_bytes,
            unseen_bytes=counted.unseen_bytes,
            snapshot_bytes=counted.snapshot_bytes,
            spare_bytes=max((free_bytes + counted.own_bytes) // 100, _LEAST_SPARE_BYTES),
        )

    def _free_bytes(self) -> int:
        # first: a write goes from them to the used bytes
        uncounted_bytes = btrfs.uncounted_bytes(self._pool) if self.access.is_btrfs else 0
        return max(sparse.space(self._pool).available_bytes - uncounted_bytes, 0)

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        return self.directories.ids()

    def snapshot_ids(self) -> frozenset[str]:
        snapshot_ids: set[str] = set()
        for set_id in self.sets.ids():
            with contextlib.suppress(errors.NotFound):  # removed since
                snapshot_ids.update(sparse.names(self.sets.directory / set_id, _SNAPSHOT))
        return frozenset(snapshot_ids)

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The file's apparent size. What is no regular file has none."""
        status = seen(self.directories.look_at(volume_id))
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else 0

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The path is no regular file, or the file is shorter than at its creation. Raises `ImageReplaced`."""
        self.access.check_image(volume_id)
        try:
            present_bytes = sparse.size_bytes(self.directories.image(volume_id))
        except sparse.NotAnImage as err:
            return str(err)
        except errors.NotFound as err:
            raise ImageMissing(volume_id) from err
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""

    def copies_at_once(self) -> bool:
        """Whether the filesystem clones files, as xfs and btrfs do; tried once."""
        if self._clones is None:
            self._clones = file_copy.clones(self._pool)
        return self._clones

    def added_bytes(self, volume_id: volumes.VolumeId) -> int:
        """By the places of the blocks. Raises `NotSeen`."""
        return self.own_blocks.added_bytes({volume_id: self.directories.image(volume_id)})

    def cloned_bytes(self, volume_id: volumes.VolumeId) -> int:
        """On btrfs what the image shares with no file; 0 elsewhere. Raises `NotSeen`."""
        if not self.access.is_btrfs:
            return 0
        return self.own_blocks.unshared_bytes(self.directories.image(volume_id))

    def check_snapshot(self, image: Image) -> None:
        if not listing.exists(self.snapshot(image)):
            raise SnapshotMissing(image.snapshot_id)

    def allocated(self, image: Image, start: int = 0) -> Iterator[extents.Extent]:
        try:
            yield from extents.allocated(self.snapshot(image), start)
        except errors.NotFound as err:
            raise SnapshotMissing(image.snapshot_id) from err

    def changed(self, base: Image, target: Image, start: int = 0) -> Iterator[extents.Extent]:
        if not self.copies_at_once():
            raise NoChangeTracking(f"the filesystem of {self._pool} does not share blocks of files")
        for image in (base, target):
            self.check_snapshot(image)
        return extents.differing(self.snapshot(base), self.snapshot(target), start)

    def snapshot(self, image: Image) -> Place:
        return copy_in(self.sets.directory / set_of(image.snapshot_id), image.snapshot_id)

    def written_back(self, volume_id: volumes.VolumeId) -> Place:
        """The file of a volume, after a write-back of its device."""
        attached = self.access.attached(volume_id)
        if attached is not None:
            devices.sync(attached.host_device.path)
        return self.directories.image(volume_id)

    @contextmanager
    def naming_full_pool(self, name: str) -> Iterator[None]:
        """Raise PoolFull if the block finds no space."""
        try:
            yield
        except syscalls.ProcessOutOfResources:  # it says nothing about the pool
            raise
        except errors.Exhausted as err:
            available_bytes = sparse.space(self._pool).available_bytes
            raise errors.Exhausted.named(
                "PoolFull",
                f"no space for {name}",
                why=f"{self._pool} has {available_bytes} free bytes",
            ) from err


def copy_in(directory: Place, snapshot_id: str) -> Place:
    """The file of a snapshot in the directory of its set, also during its creation."""
    check_file_name(snapshot_id)
    return directory / (snapshot_id + _SNAPSHOT)

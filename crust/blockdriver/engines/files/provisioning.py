"""The controller's side of the files: it makes, grows, copies and removes volumes that are sparse files.

No method needs a device; if a file has a device, the driver writes back its page cache before it reads the file, and
refuses the removal.

Bytes of others in the same filesystem do not count as the pool's space. They are the used bytes without the pool's
own, and its own bytes are measured by their places on the device, because copies share blocks. Where the filesystem
does not say the places (compression), a number that is too small would promise space that is not there: so it is the
larger of two lower bounds, what the others had when the pool was made, and what is used beyond the sum of all blocks.

A snapshot is a read-only file (mode 0400), which the driver never opens for writing. On xfs and btrfs a copy shares
its blocks with its source until a write to either. So the positions of their blocks show whether two snapshots
differ; on other filesystems they do not.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.directories import (
    Directories,
    Staged,
    VolumeDirectories,
    image_in,
)
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
from crust.blockdriver.host import extents, file_copy
from crust.core import errors, volumes
from crust.host import answers
from crust.host.block import devices
from crust.host.files import listing, sparse
from crust.host.files.durable import Place
from crust.host.process import syscalls

_SNAPSHOT = ".snap"
_READ_ONLY = 0o400
_LEAST_SPARE_BYTES = 64 * 1024**2
"""Records, extent maps and the filesystem's metadata need 1 % of the pool, and this at least."""
_LARGEST_FILE_BYTES = 16 * 1024**4 - 1024**2
"""The largest file of ext4 with 4 KiB blocks; a pool may be larger, a single file may not."""

_log = logging.getLogger(__name__)


class PoolNotUsable(errors.NotReady):
    """The directory of the images, or the loop driver, cannot be used."""

    def __init__(self, pool: str, why: str) -> None:
        super().__init__(
            "the block driver cannot serve volumes",
            why=f"{pool}: {why}",
            hint="repair it; the driver needs no restart",
        )


@dataclass(frozen=True, slots=True)
class FileMaking:
    """A volume during its creation: its image is the file `image` in a staged directory, which `commit` names."""

    pool: "FileProvisioning"
    image: Place
    commit: Callable[[Mapping[RecordKind, bytes]], None]

    def create(self, size_bytes: int) -> None:
        """A sparse file, which takes no space yet."""
        sparse.create(self.image, size_bytes)

    def restore(self, image: Image, size_bytes: int) -> None:
        """A copy of the snapshot's file."""
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
        """A copy of the volume's file."""
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
class FileTaking:
    """A set of snapshots during its creation: read-only files in the `staged` directory."""

    pool: "FileProvisioning"
    staged: Staged

    def take(self, image: Image) -> None:
        """A copy of the volume's file."""
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

    def moved_on(self, image: Image) -> bool:
        """By the positions of the blocks: a write to a block shared with a snapshot goes to a new block."""
        copy = copy_in(self.staged.path, image.snapshot_id)
        differing = extents.differing(copy, self.pool.written_back(image.volume_id))
        return next(differing, None) is not None

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Name the directory."""
        with self.pool.naming_full_pool(str(self.staged.final)):
            self.staged.commit(records)


class FileProvisioning:
    """Volumes in `directories`, with the loop devices that `access` knows of, and the `sets` of their snapshots."""

    modes = raw_modes = MODES
    is_used_elsewhere = False
    """A pool belongs to one node."""

    def __init__(
        self,
        directories: VolumeDirectories,
        sets: Directories,
        access: FileAccess,
        *,
        others_at_first: Callable[[], int],
    ) -> None:
        self.directories = directories
        self.sets = sets
        self._pool = directories.directory
        self._access = access
        self._others_at_first = others_at_first
        self._others_bytes = 0
        self._blocks: dict[str, int] = {}
        """The allocated bytes of each set that was measured: they do not change after its creation."""
        self._clones: bool | None = None

    def open(self) -> None:
        """Settle volumes and snapshots, find the attached ones, and measure other files in the pool's filesystem."""
        self.directories.open()
        self.sets.open()
        self._access.open()
        self._clones = None
        self._blocks = {}
        self._others_bytes = self._measure_others()

    def _measure_others(self) -> int:
        directories = [self.directories.directory / name for name in self.directories.ids()]
        directories += [self.sets.directory / name for name in self.sets.ids()]
        what = f"the blocks of {self._pool}"
        files = (home / name for home in directories for name in sparse.allocations(home))
        match answers.ask(what, lambda: extents.occupied_bytes(files)):
            case answers.Present(ours_bytes):
                return max(sparse.space(self._pool).used_bytes - ours_bytes, 0)
            case answers.Unseen(error):
                _log.info("the bytes of others in the pool are estimated", extra={"error": error})
        blocks, beyond_bytes = answers.ask(what, lambda: sum(map(_blocks_bytes, directories))), 0
        if isinstance(blocks, answers.Present):
            beyond_bytes = sparse.space(self._pool).used_bytes - blocks.value
        return max(beyond_bytes, self._others_at_first())

    def _set_bytes(self, set_id: str) -> int:
        """The blocks of a set. Raises `NotSeen`: without them the sum would be too small."""
        blocks_bytes = self._blocks.get(set_id)
        if blocks_bytes is None:
            home = self.sets.directory / set_id
            asked = answers.ask(
                f"the blocks of {home}", lambda: _blocks_bytes(home), absent=(errno.ENOENT,)
            )
            self._blocks[set_id] = blocks_bytes = answers.seen(asked) or 0
        return blocks_bytes

    def check_usable(self) -> None:
        """Whether the pool takes writes and the kernel has loop devices."""
        if not listing.exists(self._pool):
            raise PoolNotUsable(str(self._pool), "the directory does not exist")
        if sparse.space(self._pool).readonly:
            raise PoolNotUsable(str(self._pool), "its filesystem is read-only")
        try:
            os.close(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC))
        except OSError as err:
            raise PoolNotUsable("/dev/loop-control", syscalls.reason(err)) from err

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[FileMaking]:
        """In a directory without a name. Raises `PoolFull`."""
        with self.naming_full_pool(volume_id), self.directories.making(volume_id) as staged:
            yield FileMaking(self, image_in(staged.path, volume_id), staged.commit)

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove the directory's name, unless a loop device still has the file: its writer would lose data."""
        attachment = self._access.attached(volume_id)
        if attachment is not None:
            raise StillAttached(volume_id, attachment.shown)
        self.directories.remove(volume_id)

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[FileTaking]:
        """In a directory without a name."""
        with self.sets.making(set_id) as staged:
            yield FileTaking(self, staged)
            self._blocks.pop(set_id, None)  # of an earlier set of this name

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """Remove the directory's name."""
        self.sets.remove(set_id)

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """By the names of directories."""
        return self.directories.unsettled() + self.sets.unsettled()

    def settle(self, thing_id: volumes.VolumeId) -> None:
        """Unlink the files; it takes no removal back."""
        self.directories.settle(thing_id)
        self.sets.settle(thing_id)

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        """By the file's name alone: a file has no mark of its maker. Raises `ImageReplaced`."""
        self._access.check_image(volume_id)
        if not listing.exists(self.directories.image(volume_id)):
            raise ImageMissing(volume_id)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow the file, never shrink it; raises `PoolFull`, `ImageMissing`.

        It syncs a file that is large enough, too: a killed process may have grown it without a sync.
        """
        with self.naming_full_pool(volume_id):
            try:
                sparse.grow(self.directories.image(volume_id), size_bytes)
            except errors.NotFound as err:
                raise ImageMissing(volume_id) from err

    def maximum_bytes(self) -> int:
        """The largest possible file, at any free space: too little space is another error."""
        return _LARGEST_FILE_BYTES

    def space(self) -> PoolSpace:
        """The space of the pool's filesystem, without the other files that it had when the driver started.

        Raises `NotSeen` for a snapshot set that cannot be read.
        """
        space = sparse.space(self._pool)
        size_bytes = space.total_bytes - self._others_bytes
        return PoolSpace(
            size_bytes=size_bytes,
            free_bytes=space.available_bytes,
            snapshot_bytes=sum(map(self._set_bytes, self.sets.ids())),
            spare_bytes=max(size_bytes // 100, _LEAST_SPARE_BYTES),
        )

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The directories of the pool."""
        return self.directories.ids()

    def snapshot_ids(self) -> frozenset[str]:
        """The snapshot files of the pool."""
        snapshot_ids: set[str] = set()
        for set_id in self.sets.ids():
            with contextlib.suppress(errors.NotFound):  # removed since
                snapshot_ids.update(sparse.names(self.sets.directory / set_id, _SNAPSHOT))
        return frozenset(snapshot_ids)

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The file's apparent size. What is no regular file has none."""
        image = self.directories.image(volume_id)
        status = answers.seen(
            answers.ask(f"the image {image}", lambda: os.lstat(image), absent=(errno.ENOENT,))
        )
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else 0

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The path is no regular file, or the file is shorter than at its creation. Raises `ImageReplaced`."""
        self._access.check_image(volume_id)
        try:
            present_bytes = self.directories.size_bytes(volume_id)
        except sparse.NotAnImage as err:
            return str(err)
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""

    def copies_at_once(self) -> bool:
        """Whether the filesystem clones files, as xfs and btrfs do; tried once."""
        if self._clones is None:
            self._clones = file_copy.clones(self._pool)
        return self._clones

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The allocated bytes of the file; 0 if the filesystem clones files."""
        is_free = self.copies_at_once()
        return 0 if is_free else sparse.allocated_bytes(self.directories.image(volume_id))

    def check_snapshot(self, image: Image) -> None:
        """By the file's name."""
        if not listing.exists(self.snapshot(image)):
            raise SnapshotMissing(image.snapshot_id)

    def allocated(self, image: Image, start: int = 0) -> Iterator[extents.Extent]:
        """The parts of the snapshot's file that are not holes."""
        try:
            yield from extents.allocated(self.snapshot(image), start)
        except errors.NotFound as err:
            raise SnapshotMissing(image.snapshot_id) from err

    def changed(self, base: Image, target: Image, start: int = 0) -> Iterator[extents.Extent]:
        """The parts that the two files do not share."""
        if not self.copies_at_once():
            raise NoChangeTracking(f"the filesystem of {self._pool} does not share blocks of files")
        for image in (base, target):
            self.check_snapshot(image)
        return extents.differing(self.snapshot(base), self.snapshot(target), start)

    def snapshot(self, image: Image) -> Place:
        """The file of a snapshot, whether it exists or not."""
        return copy_in(self.sets.directory / set_of(image.snapshot_id), image.snapshot_id)

    def written_back(self, volume_id: volumes.VolumeId) -> Place:
        """The file of a volume, after a write-back of its device."""
        device = self._access.device_path(volume_id)
        if device is not None:
            devices.sync(device)
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
                hint="free space in it, or request a smaller volume",
            ) from err


def copy_in(directory: Place, snapshot_id: str) -> Place:
    """The file of a snapshot in the directory of its set, also during its creation."""
    check_file_name(snapshot_id)
    return directory / (snapshot_id + _SNAPSHOT)


def _blocks_bytes(directory: Place) -> int:
    """The allocated bytes of a volume or set, shared ones included. Raises `OSError`."""
    return sum(sparse.allocations(directory).values())

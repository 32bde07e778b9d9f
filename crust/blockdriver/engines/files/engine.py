"""The engine for sparse files, attached by loop devices.

A loop device belongs to a file by (device, inode), whichever process attached it, so a restarted driver finds its
attachments. A search through all loop devices takes time in proportion to their number, so the device of a volume is
cached, and used only after a comparison of its disk sequence, which no second attachment can have.

Each device carries a tag: the identity of the pool's directory and the end of the volume's id. So the driver
recognises its device after the file was unlinked, and never takes another program's device for its own, even one of
its images. Only devices of files that are named as an image of this pool are opened to see the tag: what other
programs have attached may hang. An image that was renamed by hand while it was attached keeps its device.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from crust import errors, volumes
from crust.blockdriver.engines.files.snapshots import FileSnapshots
from crust.blockdriver.engines.protocol import (
    READ_WRITE,
    Access,
    Attachment,
    Image,
    ImageMissing,
    PoolSpace,
    Region,
    StillAttached,
)
from crust.host.block import devices, loop
from crust.host.files import durable, file_copy, sparse, writers
from crust.host.files.held_directory import Place

_SUFFIX = ".img"
_TAG_ID_BYTES = 44
"""The kernel keeps 63 bytes of a tag; the pool's part of it takes 19."""
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


class PoolFull(errors.Exhausted):
    """The pool has less free space than an image needs."""

    def __init__(self, pool: str, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"no space for {wanted_bytes} bytes",
            why=f"{pool} has {available_bytes} free bytes",
            hint="free space in it, or request a smaller volume",
        )
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes


class Files:
    """Sparse files in one directory. `is_id`: whether a text is the id of a volume of this pool. `sector_size` of the
    loop devices, in bytes.

    It is always set: the kernel would use the alignment that the file needs for direct I/O, which on xfs changes when
    the file shares blocks with a snapshot, and then a filesystem made with smaller sectors could not be mounted.
    """

    def __init__(
        self, pool: Place, is_id: Callable[[str], bool], *, sector_size: int = 512
    ) -> None:
        self._pool = pool
        self._is_id = is_id
        self._sector_size = sector_size
        self._known: dict[volumes.VolumeId, loop.LoopDevice] = {}
        self._others_bytes = 0
        self._snapshots = FileSnapshots(pool)
        self._tag = ""
        """The tag of this pool's loop devices; `_tag_of` appends the end of the volume's id."""
        self._direct_io = True

    def _tag_of(self, volume_id: str) -> str:
        return self._tag + volume_id[-_TAG_ID_BYTES:]

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
        """Create the pool's directory, find the attached volumes, and measure other files in its filesystem."""
        durable.make_directory(self._pool, 0o700)
        durable.remove_temporary_files(self._pool)
        self._tag = _tag(os.stat(self._pool))
        self._direct_io = not file_copy.piles_up_extents(self._pool)
        self._known.clear()
        ours = self._devices()
        images = self._images_by_tag()
        for device in ours:
            if (volume_id := self._volume_of(device, images)) is not None:
                self._known[volume_id] = device
        allocations = sparse.allocations(self._pool)
        self._snapshots.open(allocations)
        space = sparse.space(self._pool)
        used_bytes = space.total_bytes - space.available_bytes
        self._others_bytes = max(used_bytes - sum(allocations.values()), 0)

    def check(self) -> None:
        """Whether the pool takes writes and the kernel has loop devices."""
        if not os.path.isdir(self._pool):
            raise PoolNotUsable(str(self._pool), "the directory does not exist")
        if sparse.space(self._pool).readonly:
            raise PoolNotUsable(str(self._pool), "its filesystem is read-only")
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            raise PoolNotUsable("/dev/loop-control", "it is absent or not accessible")

    def exists(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the image file exists."""
        return sparse.exists(self._path(volume_id))

    def create(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Create a sparse file, which takes no space yet; raises `PoolFull`."""
        with self._told_when_full(size_bytes):
            sparse.create(self._path(volume_id), size_bytes)

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow the file, never shrink it; raises `PoolFull`, `ImageMissing`.

        One that is large enough is synced too: a process that was killed may have grown it and not synced it.
        """
        with self._told_when_full(size_bytes):
            try:
                sparse.grow(self._path(volume_id), size_bytes)
            except errors.NotFound as err:
                raise ImageMissing(volume_id) from err

    def check_unused(self, volume_id: volumes.VolumeId) -> None:
        """By the loop devices."""
        attachment = self.attached(volume_id)
        if attachment is not None:
            raise StillAttached(volume_id, attachment.shown)

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Unlink the file, unless a loop device still has it: its writer would lose data."""
        self.check_unused(volume_id)
        sparse.remove(self._path(volume_id))

    def maximum_bytes(self) -> int:
        """The largest possible file, whatever the free space: too little space is another error."""
        return _LARGEST_FILE_BYTES

    def space(self) -> PoolSpace:
        """The space of the pool's filesystem, without the other files that it had when the driver started."""
        space = sparse.space(self._pool)
        return PoolSpace(
            size_bytes=space.total_bytes - self._others_bytes,
            free_bytes=space.available_bytes,
            snapshot_bytes=self._snapshots.blocks_bytes(),
            spare_bytes=_spare_bytes(space.total_bytes - self._others_bytes),
        )

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        """The image files of the pool."""
        return frozenset(volumes.VolumeId(name) for name in sparse.names(self._pool, _SUFFIX))

    def snapshot_ids(self) -> frozenset[str]:
        """The snapshot files of the pool."""
        return self._snapshots.ids()

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Files need no credentials."""

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """One loop device per file; with direct I/O except where that makes clones slow. Of any access: no other node
        reaches the file.
        """
        known = self._still_attached(volume_id)
        if known is not None:
            return known
        size_bytes = self._size_bytes(volume_id)
        path = self._path(volume_id)
        # Only this process attaches files of the pool: a file without a writer has no device.
        attach = loop.attach_once if writers.has_writers(path) else loop.attach
        device = attach(
            path,
            direct_io=self._direct_io,
            sector_size=self._sector_size,
            tag=self._tag_of(volume_id),
        )
        self._known[volume_id] = device
        return _attachment(device, loop.size_bytes(device) or size_bytes)

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes whose file has a loop device, attached before the start or after it."""
        return tuple(self._known.copy())

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The loop device of the file, from the kernel."""
        known = self._still_attached(volume_id)
        if known is not None:
            return known
        device = self._device(volume_id)
        return None if device is None else _attachment(device, loop.size_bytes(device))

    def orphans(self) -> tuple[Attachment, ...]:
        """Loop devices with this pool's tag whose file is not a volume's image any more."""
        return tuple(_attachment(each, loop.size_bytes(each)) for each in self._stray_devices())

    def drop(self, orphan: Attachment) -> None:
        """Detach it, if it still is an orphan; raises `loop.LoopDeviceHeld`."""
        for device in self._stray_devices():
            if device.identity == orphan.host_device.identity:
                loop.detach(device)

    def _stray_devices(self) -> list[loop.LoopDevice]:
        ours = self._devices()
        images = self._images_by_tag() if ours else {}
        return [each for each in ours if self._volume_of(each, images) is None]

    def _devices(self, among: Iterable[int] | None = None) -> list[loop.LoopDevice]:
        """The loop devices with this pool's tag; only of the numbers `among`, if they are given."""
        named = loop.list_named(self._is_image, among)
        return [each for each in named if each.tag.startswith(self._tag)]

    def _is_image(self, name: str) -> bool:
        return name.endswith(_SUFFIX) and self._is_id(name.removesuffix(_SUFFIX))

    def _images_by_tag(self) -> dict[str, volumes.VolumeId]:
        return {self._tag_of(each): each for each in self.image_ids()}

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give the loop device the file's size."""
        device = self._device(volume_id)
        if device is None:
            return None
        loop.refresh_size(device)
        return _attachment(device, loop.size_bytes(device))

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """By the file's holes, after writing back the page cache of its device."""
        device = self._device_path(volume_id)
        if device is not None:
            devices.sync(device)
        try:
            return sparse.is_hole(self._path(volume_id))
        except errors.NotFound as err:
            raise ImageMissing(volume_id) from err

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach the file's loop device; raises `loop.LoopDeviceHeld`."""
        device = self._device(volume_id)
        if device is not None:
            loop.detach(device)
        self._known.pop(volume_id, None)

    def attach_limit(self, foreign: int) -> int:
        """The loop devices that there can be, less those that other programs have."""
        return max(loop.numbers() - foreign, 1)

    def foreign_attachments(self) -> int:
        """The loop devices that do not have this pool's tag, now; those of empty files are not counted.

        A node may have hundreds of devices that are not attached: no list of sizes has them.
        Volumes are attached and detached meanwhile, by other threads. A device that is not known as a volume's is
        judged by itself, by its file's name and tag; one that is gone at the end, or known by then, is not counted.
        """
        unknown = loop.sized() - self._known_numbers()
        ours = {each.number for each in self._devices(unknown)} if unknown else frozenset()
        rest = unknown - ours
        return len((rest & loop.sized()) - self._known_numbers()) if rest else 0

    def foreign_at_most(self) -> int:
        """The loop devices that exist, attached or not, and whoever attached them."""
        return loop.existing_at_most()

    def _known_numbers(self) -> frozenset[int]:
        return frozenset(each.number for each in self._known.copy().values())

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The file's apparent size."""
        try:
            return self._size_bytes(volume_id)
        except errors.CrustError:
            return 0

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """The file is absent or shorter than it was created."""
        try:
            present_bytes = self._size_bytes(volume_id)
        except errors.Corrupt as err:
            return str(err)
        if present_bytes < size_bytes:
            return f"the image has {present_bytes} bytes and should have {size_bytes}"
        return ""

    def changing(self, volume_id: volumes.VolumeId) -> AbstractContextManager[None]:
        """Nothing: one process has the pool, and serialises what it does to a volume."""
        return nullcontext()

    def copies_at_once(self) -> bool:
        """True on xfs and btrfs."""
        return self._snapshots.by_reference

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """The allocated bytes of the file; 0 where files are cloned."""
        return 0 if self.copies_at_once() else sparse.allocated_bytes(self._path(volume_id))

    def take_snapshot(self, image: Image) -> None:
        """A read-only file beside the image."""
        device = self._device_path(image.volume_id)
        with self._told_when_full(image.size_bytes):
            self._snapshots.take(image, self._path(image.volume_id), device)

    def take_group(self, images: Sequence[Image]) -> bool:
        """One file after the other is not one moment."""
        return False

    def moved_on(self, image: Image) -> bool:
        """By the positions of the blocks: a write to a block shared with a snapshot goes to a new one."""
        device = self._device_path(image.volume_id)
        return self._snapshots.moved_on(image, self._path(image.volume_id), device)

    def delete_snapshot(self, image: Image) -> None:
        """Unlink the file."""
        self._snapshots.delete(image)

    def restore(self, volume_id: volumes.VolumeId, image: Image, size_bytes: int) -> None:
        """A copy of the snapshot's file, in place of a volume's file that was not attached yet."""
        with self._told_when_full(size_bytes):
            self._snapshots.restore(image, self._path(volume_id), size_bytes)

    def clone(
        self,
        volume_id: volumes.VolumeId,
        source: volumes.VolumeId,
        *,
        source_bytes: int,
        size_bytes: int,
    ) -> None:
        """A copy of the volume's file."""
        device = self._device_path(source)
        with self._told_when_full(size_bytes):
            try:
                self._snapshots.clone(
                    self._path(source),
                    device,
                    self._path(volume_id),
                    source_bytes=source_bytes,
                    size_bytes=size_bytes,
                )
            except errors.NotFound as err:
                raise ImageMissing(source) from err

    def allocated(self, image: Image) -> tuple[Region, ...]:
        """The allocated parts of the snapshot's file."""
        return self._snapshots.allocated(image)

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """The parts that the two files do not share."""
        return self._snapshots.changed(base, target)

    def _device_path(self, volume_id: volumes.VolumeId) -> str | None:
        device = self._device(volume_id)
        return None if device is None else device.path

    @contextmanager
    def _told_when_full(self, wanted_bytes: int) -> Iterator[None]:
        try:
            yield
        except errors.Exhausted as err:
            available_bytes = sparse.space(self._pool).available_bytes
            raise PoolFull(str(self._pool), wanted_bytes, available_bytes) from err

    def _still_attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The cached device, if it is still the same: a disk sequence is never used twice."""
        known = self._known.get(volume_id)
        size_bytes = loop.size_bytes(known) if known is not None else 0
        return _attachment(known, size_bytes) if known is not None and size_bytes else None

    def _volume_of(
        self, device: loop.LoopDevice, images: dict[str, volumes.VolumeId]
    ) -> volumes.VolumeId | None:
        """The volume whose image the device has; None if the image was removed or replaced since."""
        volume_id = images.get(device.tag)
        if volume_id is None:
            return None
        try:
            status = os.lstat(self._path(volume_id))
        except FileNotFoundError:
            return None
        except OSError:
            return volume_id  # not known to be another image: left alone
        return volume_id if device.file == (status.st_dev, status.st_ino) else None

    def _device(self, volume_id: volumes.VolumeId) -> loop.LoopDevice | None:
        known = self._known.get(volume_id)
        if known is not None and loop.size_bytes(known):
            return known
        path = self._path(volume_id)
        # The search asks for the file of every loop device of the node; most volumes have none.
        found = loop.find(path) if writers.has_writers(path) else ()
        if len(found) > 1:
            raise loop.LoopAttachedDifferently(
                str(path), found, "more than one loop device writes to the file"
            )
        if not found:
            self._known.pop(volume_id, None)
            return None
        self._known[volume_id] = found[0]
        return found[0]

    def _size_bytes(self, volume_id: volumes.VolumeId) -> int:
        try:
            return sparse.size_bytes(self._path(volume_id))
        except errors.NotFound as err:
            raise ImageMissing(volume_id) from err

    def _path(self, volume_id: volumes.VolumeId) -> Place:
        if not volume_id.replace("-", "").isalnum() or not volume_id.isascii():
            raise errors.InvalidRequest(f"{volume_id!r} cannot be the name of an image")
        return self._pool / (volume_id + _SUFFIX)


def _spare_bytes(size_bytes: int) -> int:
    """1 % of the pool, at least 64 MiB: records, extent maps and the filesystem's metadata need it."""
    return max(size_bytes // 100, _LEAST_SPARE_BYTES)


def _tag(pool: os.stat_result) -> str:
    digest = hashlib.sha256(f"{pool.st_dev}:{pool.st_ino}".encode()).hexdigest()
    return f"crust:{digest[:12]}:"


def _attachment(device: loop.LoopDevice, size_bytes: int) -> Attachment:
    return Attachment(volumes.BlockSource(device.path, device.identity), size_bytes)

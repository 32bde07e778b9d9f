"""A backend whose images are numbers, for rules that need no bytes. It raises the errors of the engine for files.

The records of its volumes are in the directories of the engine for files, which come and go as there.

Without `has_devices` nothing is a device of this host, as with an engine whose images only hypervisors open.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from crust.blockdriver.engines import files
from crust.blockdriver.engines.files.directories import Directories, Staged, VolumeDirectories
from crust.blockdriver.engines.files.provisioning import FileProvisioning
from crust.blockdriver.engines.pool_access import READ_WRITE, Access, Attachment, RecordKind, set_of
from crust.blockdriver.engines.protocol import (
    Engine,
    Image,
    ImageMissing,
    NoChangeTracking,
    PoolSpace,
    SnapshotMissing,
    StillAttached,
    orphan_image,
)
from crust.blockdriver.host.extents import Extent
from crust.core import errors, volumes

POOL_BYTES = 10 * 1024**3
SPARE_BYTES = POOL_BYTES // 99
"""One percent of both."""


@dataclass(slots=True)
class NewMemoryVolume:
    """A volume that is being made, in a directory as the engine for files has it."""

    volume_id: volumes.VolumeId
    backend: "MemoryBackend"
    staged: Staged
    size_bytes: int = 0

    def create(self, size_bytes: int) -> None:
        """Make an image, if there is capacity."""
        self.backend.check_free(size_bytes)
        self.size_bytes = size_bytes

    def allocate(self, size_bytes: int) -> None:
        """Numbers have no blocks."""

    def restore(self, image: Image, size_bytes: int) -> None:
        """An image at least as large as the snapshot."""
        self.backend.check_snapshot(image)
        snapshot_bytes = self.backend.snapshots[image.snapshot_id]
        self.create(max(size_bytes, snapshot_bytes))

    def clone(self, source: volumes.VolumeId, *, source_bytes: int, size_bytes: int) -> None:
        """An image at least as large as the source."""
        self.backend.check_image(source)
        image_bytes = self.backend.images[source]
        if image_bytes < source_bytes:
            raise errors.Corrupt(f"{source} is cut short")
        self.create(max(size_bytes, image_bytes))

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Name the directory, which has the number from then on, whether the call ends or not."""
        try:
            self.staged.commit(records)
        finally:
            if self.volume_id in self.backend.directories.ids():
                self.backend.images[self.volume_id] = self.size_bytes


@dataclass(slots=True)
class NewMemorySnapshotSet:
    """A set that is being taken, in a directory as the engine for files has it."""

    backend: "MemoryBackend"
    staged: Staged
    snapshots: dict[str, int]
    volume_ids: set[volumes.VolumeId] = dataclasses.field(default_factory=set)

    def take(self, image: Image) -> None:
        if image.volume_id not in self.backend.images:
            raise ImageMissing(image.volume_id)
        self.snapshots[image.snapshot_id] = self.backend.images[image.volume_id]
        self.volume_ids.add(image.volume_id)
        self.backend.taken.append(image.volume_id)

    def added_bytes(self) -> int:
        """What the volumes have that were taken."""
        return sum(map(self.backend.added_bytes, self.volume_ids))

    def moved_on(self, image: Image) -> bool:
        """As `written` says; copies of numbers take no time."""
        return bool(self.backend.written) and image.volume_id in self.backend.written.pop(0)

    def commit(self, records: Mapping[RecordKind, bytes]) -> None:
        """Name the directory."""
        self.staged.commit(records)


class MemoryBackend:
    """Images by id, and which of them are attached."""

    modes = frozenset({
        volumes.AccessMode.SINGLE_NODE_WRITER,
        volumes.AccessMode.SINGLE_NODE_READER_ONLY,
        volumes.AccessMode.SINGLE_NODE_SINGLE_WRITER,
        volumes.AccessMode.SINGLE_NODE_MULTI_WRITER,
    })  # fmt: skip
    raw_modes = modes

    def __init__(self, *, has_devices: bool = True) -> None:
        self._has_devices = has_devices
        self.directories: VolumeDirectories
        self.sets: Directories
        """Of the pool that it was last used with (`engine`)."""
        self.images: dict[volumes.VolumeId, int] = {}
        self.snapshots: dict[str, int] = {}
        self._attached: set[volumes.VolumeId] = set()
        self.is_used_elsewhere = False
        self.maximum_bytes = 1 << 44
        """Larger than the pool, as with files."""
        self.written: list[set[volumes.VolumeId]] = []
        """Of each round of a group the volumes that are written to after they are copied."""
        self.taken: list[str] = []
        self.allocated_now: dict[str, int] = {}
        """How much each volume has written; the copies of a set have what its volumes have at that moment."""

    def open(self) -> None:
        """Settle the directories."""
        self.directories.open()
        self.sets.open()

    def check_usable(self) -> None:
        """Always usable."""

    @contextmanager
    def making(self, volume_id: volumes.VolumeId) -> Iterator[NewMemoryVolume]:
        """An image of a number, and a directory for its records."""
        if volume_id in self.images:
            raise orphan_image(volume_id, "its number")
        with self.directories.making(volume_id) as staged:
            yield NewMemoryVolume(volume_id, self, staged)

    def remove(self, volume_id: volumes.VolumeId) -> None:
        """Remove a volume that is not attached."""
        if volume_id in self._attached:
            raise StillAttached(volume_id, "memory")
        was_there = volume_id in self.directories.ids()
        try:
            self.directories.remove(volume_id)
        finally:
            if was_there and volume_id not in self.directories.ids():
                self.images.pop(volume_id, None)

    def unsettled(self) -> tuple[volumes.VolumeId, ...]:
        """Of the directories."""
        return self.directories.unsettled() + self.sets.unsettled()

    def settle(self, volume_or_set_id: volumes.VolumeId) -> None:
        """Remove the directories."""
        self.directories.settle(volume_or_set_id)
        self.sets.settle(volume_or_set_id)

    @contextmanager
    def taking(self, set_id: str, images: Sequence[Image]) -> Iterator[NewMemorySnapshotSet]:
        """Numbers, which are there while the directory with their record is."""
        taken: dict[str, int] = {}
        try:
            with self.sets.making(set_id) as staged:
                yield NewMemorySnapshotSet(self, staged, taken)
        finally:
            if set_id in self.sets.ids():
                self.snapshots.update(taken)

    def remove_set(self, set_id: str, images: Sequence[Image]) -> None:
        """Remove the directory."""
        try:
            self.sets.remove(set_id)
        finally:
            if set_id not in self.sets.ids():
                for snapshot in [s for s in self.snapshots if set_of(s) == set_id]:
                    del self.snapshots[snapshot]

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        if volume_id not in self.images:
            raise ImageMissing(volume_id)

    def thick_obstacle(self) -> str:
        """As on xfs."""
        return ""

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int, *, thick: bool = False) -> None:
        """Grow an image, if there is capacity."""
        if volume_id not in self.images:
            raise ImageMissing(volume_id)
        self.check_free(size_bytes)
        self.images[volume_id] = max(size_bytes, self.images[volume_id])

    def space(self) -> PoolSpace:
        """Written data takes no space here."""
        return PoolSpace(POOL_BYTES + SPARE_BYTES, spare_bytes=SPARE_BYTES)

    def image_ids(self) -> frozenset[volumes.VolumeId]:
        return frozenset(self.images)

    def snapshot_ids(self) -> frozenset[str]:
        return frozenset(self.snapshots)

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Nothing is asked for them."""

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        if volume_id not in self.images:
            raise ImageMissing(volume_id)
        self._attached.add(volume_id)
        return self._attachment(volume_id)

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        return tuple(self._attached)

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        return self._attachment(volume_id) if volume_id in self._attached else None

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        return self.attached(volume_id)

    def orphans(self) -> tuple[Attachment, ...]:
        """Numbers leave no orphans."""
        return ()

    def drop(self, orphan: Attachment) -> None:
        """There is none."""

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The mark, with the present size."""
        return self.attached(volume_id)

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Numbers have no bytes."""
        return True

    def detach(self, volume_id: volumes.VolumeId) -> None:
        self._attached.discard(volume_id)

    def image_bytes(self, volume_id: volumes.VolumeId) -> int:
        return self.images.get(volume_id, 0)

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        """An image that is smaller than it should be."""
        self.check_image(volume_id)
        return "" if self.images[volume_id] >= size_bytes else "too small"

    def copies_at_once(self) -> bool:
        """As on xfs."""
        return True

    def added_bytes(self, volume_id: volumes.VolumeId) -> int:
        """As `allocated_now` says; in the pool's space it is nothing."""
        return self.allocated_now.get(volume_id, 0)

    def cloned_bytes(self, volume_id: volumes.VolumeId) -> int:
        """As on xfs."""
        return 0

    def check_snapshot(self, image: Image) -> None:
        if image.snapshot_id not in self.snapshots:
            raise SnapshotMissing(image.snapshot_id)

    def allocated(self, image: Image, start: int = 0) -> tuple[Extent, ...]:
        if image.snapshot_id not in self.snapshots:
            raise SnapshotMissing(image.snapshot_id)
        return (Extent(0, self.snapshots[image.snapshot_id]),)

    def changed(self, base: Image, target: Image, start: int = 0) -> tuple[Extent, ...]:
        """Numbers have no blocks."""
        raise NoChangeTracking("the images are numbers")

    def check_free(self, size_bytes: int) -> None:
        """Raise `Exhausted` for more than the pool has."""
        if size_bytes > POOL_BYTES:
            raise errors.Exhausted(f"no capacity for {size_bytes} bytes")

    def _attachment(self, volume_id: volumes.VolumeId) -> Attachment:
        identity = volumes.DeviceIdentity(0, 0, 1)
        device = volumes.BlockSource("/memory", identity)
        image = volumes.NetworkImage("fsid", "rbd", "", volume_id, ("192.0.2.1:6789",), "csi")
        return Attachment(device if self._has_devices else image, self.images[volume_id])


def engine(state_dir: str, backend: MemoryBackend, *, create: bool = True) -> Engine:
    """An engine with its records in the files of `state_dir` and its images in memory."""
    made = files.engine(state_dir, create=create)
    assert isinstance(made.provisioning, FileProvisioning)
    backend.directories = made.provisioning.directories
    backend.sets = made.provisioning.sets
    return dataclasses.replace(made, provisioning=backend, access=backend)

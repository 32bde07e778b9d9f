"""A backend whose images are numbers, for rules that need no bytes. It raises the errors of the engine for files.

Without `has_devices` nothing is a device of this host, as with an engine whose images only hypervisors open.
"""

import dataclasses
from collections.abc import Mapping

from crust.blockdriver.engines import files
from crust.blockdriver.engines.protocol import (
    READ_WRITE,
    Access,
    Attachment,
    Engine,
    Image,
    ImageMissing,
    NoChangeTracking,
    PoolSpace,
    Region,
    SnapshotMissing,
    StillAttached,
)
from crust.core import errors, volumes

POOL_BYTES = 10 * 1024**3
SPARE_BYTES = POOL_BYTES // 99
"""One percent of both."""


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
        self.images: dict[volumes.VolumeId, int] = {}
        self.snapshots: dict[str, int] = {}
        self._attached: set[volumes.VolumeId] = set()
        self.is_used_elsewhere = False
        self.written: list[set[volumes.VolumeId]] = []
        """Of each round of a group the volumes that are written to after they are copied."""
        self.taken: list[str] = []

    def open(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Always usable."""

    def exists(self, volume_id: volumes.VolumeId) -> bool:
        return volume_id in self.images

    def check_image(self, volume_id: volumes.VolumeId) -> None:
        if volume_id not in self.images:
            raise ImageMissing(volume_id)

    def create(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Make an image, if there is capacity."""
        self._check_free(size_bytes)
        self.images[volume_id] = max(size_bytes, self.images.get(volume_id, 0))

    def grow(self, volume_id: volumes.VolumeId, size_bytes: int) -> None:
        """Grow an image, if there is capacity."""
        if volume_id not in self.images:
            raise ImageMissing(volume_id)
        self._check_free(size_bytes)
        self.images[volume_id] = max(size_bytes, self.images[volume_id])

    def check_unused(self, volume_id: volumes.VolumeId) -> None:
        """By what is attached."""
        if volume_id in self._attached:
            raise StillAttached(volume_id, "memory")

    def delete(self, volume_id: volumes.VolumeId) -> None:
        """Remove an image that is not attached."""
        self.check_unused(volume_id)
        self.images.pop(volume_id, None)

    def maximum_bytes(self) -> int:
        """Larger than the pool, as with files."""
        return 1 << 44

    def space(self) -> PoolSpace:
        """Written data takes no space here."""
        return PoolSpace(POOL_BYTES + SPARE_BYTES, POOL_BYTES + SPARE_BYTES, 0, SPARE_BYTES)

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
        return "" if self.images.get(volume_id, 0) >= size_bytes else "too small"

    def copies_at_once(self) -> bool:
        """As on xfs."""
        return True

    def copy_bytes(self, volume_id: volumes.VolumeId) -> int:
        """Numbers take no space."""
        return 0

    def check_snapshot(self, image: Image) -> None:
        if image.snapshot_id not in self.snapshots:
            raise SnapshotMissing(image.snapshot_id)

    def take_snapshot(self, image: Image) -> None:
        if image.volume_id not in self.images:
            raise ImageMissing(image.volume_id)
        self.snapshots[image.snapshot_id] = self.images[image.volume_id]
        self.taken.append(image.volume_id)

    def moved_on(self, image: Image) -> bool:
        """As `written` says; copies of numbers take no time."""
        return bool(self.written) and image.volume_id in self.written.pop(0)

    def delete_snapshot(self, image: Image) -> None:
        self.snapshots.pop(image.snapshot_id, None)

    def restore(self, volume_id: volumes.VolumeId, image: Image, size_bytes: int) -> None:
        """An image at least as large as the snapshot."""
        if image.snapshot_id not in self.snapshots:
            raise SnapshotMissing(image.snapshot_id)
        self._check_free(size_bytes)
        self.images[volume_id] = max(size_bytes, self.snapshots[image.snapshot_id])

    def clone(
        self,
        volume_id: volumes.VolumeId,
        source: volumes.VolumeId,
        *,
        source_bytes: int,
        size_bytes: int,
    ) -> None:
        """An image at least as large as the source."""
        if source not in self.images:
            raise ImageMissing(source)
        if self.images[source] < source_bytes:
            raise errors.Corrupt(f"{source} is cut short")
        self._check_free(size_bytes)
        self.images[volume_id] = max(size_bytes, self.images[source])

    def allocated(self, image: Image) -> tuple[Region, ...]:
        if image.snapshot_id not in self.snapshots:
            raise SnapshotMissing(image.snapshot_id)
        return (Region(0, self.snapshots[image.snapshot_id]),)

    def changed(self, base: Image, target: Image) -> tuple[Region, ...]:
        """Numbers have no blocks."""
        raise NoChangeTracking("the images are numbers")

    def _check_free(self, size_bytes: int) -> None:
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
    return dataclasses.replace(made, provisioning=backend, access=backend)

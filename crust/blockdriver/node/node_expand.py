"""Growth: the device takes its image's size, then the filesystem takes its device's.

If the CO calls no ControllerExpandVolume (`grow_image`), the image takes the requested size first.

A filesystem must not stay smaller than its device. Growth is due whenever the device is larger than the recorded
`filled_bytes`: at the first writable mount on this host, and at NodeExpandVolume. A guest grows the filesystem that
it has mounted. A filesystem that cannot grow keeps its size, and the driver still publishes it: the record holds the
reason, for the volume's condition, until a later call grows it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from crust.blockdriver.engines.pool_access import Attachment
from crust.blockdriver.host import device_mounts
from crust.blockdriver.records import capability_check, node_state
from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.host.mounts import growth, mountinfo
from crust.host.process import workers

_log = logging.getLogger(__name__)


class OnlineGrowthRefused(errors.NotReady):
    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"the filesystem of {volume_id} cannot grow while it is mounted", why=why)


class NotPublishedAtPath(errors.NotFound):
    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(f"{volume_id} is not published or staged at {path}")


@dataclass(frozen=True, slots=True)
class Expand:
    """A NodeExpandVolume. With `deferred` a guest grows the filesystem."""

    volume_id: volumes.VolumeId
    path: volumes.TargetPath
    capacity: volumes.CapacityRange
    deferred: bool
    capability: volumes.VolumeCapability | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


ImageGrowth = Callable[[volumes.VolumeId, volumes.CapacityRange], None]
"""Gives the image of a volume a size of the range, if it has less. Blocks. Raises `Exhausted`, `OutOfRange`."""


@dataclass(frozen=True, slots=True)
class NodeExpand:
    """NodeExpandVolume, and growth that is due at a publish."""

    stores: Stores
    grow_image: ImageGrowth | None = None
    """Grows the image before the look at its device, if no other caller grows images."""

    async def expand(self, request: Expand) -> int:
        """Grow device and filesystem on this node; returns the device's size in bytes.

        Raises `models.VolumeNotFound`, `capability_check.CapabilityNotSupported`, `NotStaged`,
        `NotPublishedAtPath`, `DeviceSmallerThanRequested`, `capability_check.AboveLimit`, and `OnlineGrowthRefused`
        without a writable mount, or if the kernel does not let this process grow an ext4; and the errors of
        `grow_image`.
        """
        content, attachment, due = await workers.run(self._begin, request)
        if due is None:
            return attachment.size_bytes
        try:
            await workers.run(self._grow, content, attachment, *due)
        except growth.MissingCapability as err:
            raise OnlineGrowthRefused(request.volume_id, err.why) from err
        return attachment.size_bytes

    async def fill(
        self, content: ContentRecord, attachment: Attachment, fs_type: str, mountpoint: str
    ) -> None:
        """Grow a filesystem after its mount. A failure keeps its size, and is logged and recorded."""
        try:
            await workers.run(self._grow, content, attachment, fs_type, mountpoint)
        except errors.CrustError:
            return

    def _begin(self, request: Expand) -> tuple[ContentRecord, Attachment, tuple[str, str] | None]:
        """Give the device its size; returns also the filesystem that must grow, and its mount point."""
        self.stores.access.use(request.volume_id, request.secrets)
        self.stores.volume_records.load(request.volume_id)
        content = self.stores.content_records.load(request.volume_id)
        self._check_capability(request)
        if (
            self.grow_image is not None
            and self.stores.access.attached(request.volume_id) is not None
        ):
            self.grow_image(request.volume_id, request.capacity)
        attachment = self.stores.access.refresh(request.volume_id)
        if attachment is None:
            raise node_state.NotStaged(request.volume_id)
        size_bytes, wanted = attachment.size_bytes, request.capacity
        if size_bytes < wanted.required_bytes:
            raise errors.OutOfRange.named(
                "DeviceSmallerThanRequested",
                f"{request.volume_id} cannot be expanded to {wanted.required_bytes} bytes on this node",
                why=f"its device has {size_bytes}",
            )
        if wanted.limit_bytes and size_bytes > wanted.limit_bytes:
            raise capability_check.AboveLimit(request.volume_id, size_bytes, wanted.limit_bytes)
        due = self._due(request, attachment)
        if due is None or size_bytes <= content.filled_bytes:
            return content, attachment, None
        fs_type, mountpoint = due
        if mountpoint:
            return content, attachment, due
        if device_mounts.filesystem_mounts(attachment.host_device):
            raise OnlineGrowthRefused(request.volume_id, "each of its mounts is read-only")
        if obstacle := growth.obstacle(fs_type):
            raise OnlineGrowthRefused(request.volume_id, obstacle)
        return content, attachment, None  # the first mount does it

    def _check_capability(self, request: Expand) -> None:
        """CSI NodeExpandVolume: INVALID_ARGUMENT for a capability without support, or not of the stage."""
        if request.capability is None:
            return
        obstacle = self.stores.supported.obstacle(request.capability)
        staged = self.stores.node_state.of(request.volume_id).stage
        raw = isinstance(request.capability.access, volumes.BlockAccess)
        if not obstacle and staged is not None and raw != (staged.kind == "block"):
            obstacle = f"it is staged as {staged.kind}"
        if obstacle:
            raise capability_check.CapabilityNotSupported(obstacle)

    def _due(self, request: Expand, attachment: Attachment) -> tuple[str, str] | None:
        """The filesystem that this host must grow, and its mount point; "" if it has no writable mount."""
        file = self.stores.node_state.of(request.volume_id)
        entry = self.stores.node_state.published(request.path)
        mount = mountinfo.at(request.path.text)
        if request.deferred or (entry is not None and entry.deferred):
            return None
        if mount is not None and device_mounts.is_node(mount, attachment.host_device):
            return None
        if mount is not None and device_mounts.is_filesystem(mount, attachment.host_device):
            place = request.path.text if mount.writes_here else ""
            return mount.fs_type, place or _writable_mountpoint(attachment.host_device)
        if file.stage is None or request.path.text not in file.stage.paths:
            raise NotPublishedAtPath(request.volume_id, request.path.text)
        if file.stage.kind == "block" or any(publish.deferred for publish in file.publishes):
            return None
        return file.stage.fs_type, _writable_mountpoint(attachment.host_device)

    def _grow(
        self, content: ContentRecord, attachment: Attachment, fs_type: str, mountpoint: str
    ) -> None:
        save, size_bytes = self.stores.content_records.save, attachment.size_bytes
        try:
            growth.grow_mounted(mountpoint, fs_type)
        except errors.CrustError as err:
            extra = {"volume_id": content.volume_id, "error": str(err)}
            _log.warning("the filesystem is not grown", extra=extra)
            refused = f"the filesystem keeps its old size: {err.why or err}"
            save(content.replaced(growth_refused=refused))
            raise
        save(content.replaced(filled_bytes=size_bytes, growth_refused=""))


def _writable_mountpoint(source: volumes.BlockSource) -> str:
    return next(
        (mount.target for mount in device_mounts.filesystem_mounts(source) if mount.writes_here), ""
    )

"""NodeUnpublishVolume unmounts and removes the target; NodeUnstageVolume detaches after the last staging path.

For both the kernel decides, and not the node state: a volume can be unpublished after its deletion, a lost node state
or an interrupted publish, and when another pool is in the place of its own; a mount without a record keeps the device
attached. A deferred publish has no mount of this driver: the proxy's guard mount is at its target, and the proxy
removes it. The driver answers when mountinfo does not show the mount any more.

Each hour the driver detaches devices that crashes left attached on this node, unless they may be in use:

    attached, not staged                  detached if it is not open: its stage was never completed
    attached, image removed               detached if it is not open; recognised by the tag of `attach`
    attached, image replaced              kept: it alone has what was written since (`ImageReplaced`)
    attached by another program           left alone, with any file
"""

import logging
from dataclasses import dataclass
from functools import partial

from crust.blockdriver.engines.pool_access import Attachment, pool_of
from crust.blockdriver.engines.protocol import ForeignImage, ImageMissing
from crust.blockdriver.host import device_mounts
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.host.block import users
from crust.host.files import listing, target_paths
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import workers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeUnpublish:
    """Unpublishes volumes. The caller makes one call per volume at a time."""

    stores: Stores
    target_roots: tuple[str, ...]

    def unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        """Remove the publish and its target; not published is a success.

        Raises `OtherVolumeAtTarget`, `ForeignMountAtTarget`, `holders.DeviceInUse` (with its users), and the errors
        of `target_paths`. Blocks.
        """
        entry = self.stores.node_state.published(target)
        if entry is not None and entry.volume_id != volume_id:
            raise errors.Conflict.named(
                "OtherVolumeAtTarget",
                f"{volume_id} is not unpublished from {target.text}",
                why=f"{entry.volume_id} is published there",
            )
        mount = mountinfo.at(target.text)
        is_deferred = entry is not None and entry.deferred
        # The proxy removes its guard mount, also of a deferred publish that the node state has lost. Without a mount
        # no other process knows the target of a deferred publish.
        is_guarded = mount is not None and (is_deferred or mount_api.is_guard(mount))
        if mount is not None and not is_guarded:
            # Checked before the unmount: /home is a mount as well, and so may be the target of a link.
            with target_paths.parent_of(target, self.target_roots):
                # it does not ask the storage: a pod must end without it
                ours = self.stores.access.host_device(volume_id) if pool_of(volume_id) else None
                device = ours.device if ours is not None else None
                # without an attached device the driver cannot know it, and the CO decides
                if device is not None and not device_mounts.shows(mount, device):
                    raise errors.NotReady.named(
                        "ForeignMountAtTarget",
                        f"{volume_id} is not unpublished from {target.text}",
                        why=f"{mount.fs_type} from {mount.source} is mounted there",
                    )
            mount_api.unmount(target.text)
        if not is_guarded:
            target_paths.remove(target, self.target_roots)
        if not self.stores.node_state.unreadable(volume_id):
            self.stores.node_state.forget_published(volume_id, target)


class StillPublished(errors.NotReady):
    def __init__(self, volume_id: str, targets: tuple[str, ...]) -> None:
        super().__init__(
            f"{volume_id} cannot be unstaged", why=f"it is still published at {', '.join(targets)}"
        )


@dataclass(frozen=True, slots=True)
class NodeUnstage:
    """Unstages volumes. The caller makes one call per volume at a time."""

    stores: Stores
    io_limits: IoLimits

    def unstage(self, volume_id: volumes.VolumeId, path: volumes.TargetPath) -> None:
        """Detach the volume if `path` is its last staging path; not staged, or unknown, is a success.

        Raises `StillPublished`, and `NotReady` with the holder while the device is in use. Blocks.
        """
        if not pool_of(volume_id):
            return
        unreadable = self.stores.node_state.unreadable(volume_id)
        staged = None if unreadable else self.stores.node_state.of(volume_id).stage
        # that the CO has not removed
        paths = () if staged is None else staged.paths
        other_paths = tuple(
            other for other in paths if other != path.text and listing.is_directory(other)
        )
        if staged is not None and other_paths:
            self.stores.node_state.note_staged(staged.model_copy(update={"paths": other_paths}))
            return
        published = () if unreadable else self.stores.node_state.live_publishes(volume_id)
        if published:
            raise StillPublished(volume_id, tuple(entry.target for entry in published))
        try:
            attachment = self.stores.access.host_device(volume_id)
        except (ImageMissing, ForeignImage):
            attachment = None  # somebody removed or replaced the image: its pod must be able to end
        if attachment is None:
            self.stores.access.detach(volume_id)  # the rest of a failed stage
        else:
            device = attachment.device
            if device is not None:
                mounts = device_mounts.filesystem_mounts(device) if users.is_held(device) else ()
                if not mounts and (staged is None or staged.kind == "block"):
                    mounts = device_mounts.node_mounts(device)
                if mounts:
                    raise StillPublished(volume_id, tuple(mount.target for mount in mounts))
            with self.io_limits.released(attachment):
                self.stores.access.detach(volume_id)
        self.stores.node_state.forget_staged(volume_id)

    async def collect(self) -> None:
        """Detach devices that crashes left attached: of volumes that are not staged, or have no image any more.

        Devices that may be in use, or that another program attached, stay. Each detach is an operation of its volume,
        so it never runs beside another call for it.
        """
        name = "detaching of a device that is not staged"
        for volume_id in await workers.run(self.stores.access.attached_here):
            if self._is_staged(volume_id):
                continue
            detach = partial(workers.run, self._detach_unused, volume_id)
            try:
                await self.stores.running.run(volume_id, name, None, detach)
            except errors.CrustError as err:
                extra = {"volume_id": volume_id, "error": err}
                _log.info("an unused device stays attached", extra=extra)
        await workers.run(self._drop_orphans)

    def _is_staged(self, volume_id: volumes.VolumeId) -> bool:
        """Whether there is an entry, readable or not."""
        unreadable = self.stores.node_state.unreadable(volume_id)
        return bool(unreadable) or self.stores.node_state.of(volume_id).stage is not None

    def _detach_unused(self, volume_id: volumes.VolumeId) -> None:
        attachment = self.stores.access.attached(volume_id)
        if attachment is None or self._is_staged(volume_id):
            return
        if not _is_shown(attachment):
            with self.io_limits.released(attachment):
                self.stores.access.detach(volume_id)
            _log.info("detached a device that is not staged", extra={"volume_id": volume_id})

    def _drop_orphans(self) -> None:
        """Detach devices without an image; no operation of the volume would find them."""
        for orphan in self.stores.access.orphans():
            extra = {"device": orphan.shown}
            if _is_shown(orphan):
                _log.info("a device whose image was removed stays attached", extra=extra)
                continue
            try:
                with self.io_limits.released(orphan):
                    self.stores.access.drop(orphan)
            except errors.CrustError as err:
                _log.info("an unused device stays attached", extra={**extra, "error": err})
            else:
                _log.warning("detached a device whose image was removed", extra=extra)


def _is_shown(attachment: Attachment) -> bool:
    """Whether the node is bound anywhere, by mountinfo: a bound node is not open, and node state can be lost."""
    device = attachment.device
    return device is not None and any(
        device_mounts.shows(mount, device) for mount in mountinfo.below("/")
    )

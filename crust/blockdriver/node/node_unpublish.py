"""NodeUnpublishVolume: unmounts and removes the target, whatever the driver has recorded about it.

The kernel decides, not the node state: deleted volumes, lost node state and interrupted publishes are unpublished
too. A deferred publish has no mount of this driver; at its target is the proxy's guard mount, which the proxy
removes. The answer is sent when mountinfo does not show the mount any more.

NodeUnstageVolume: the device is detached with the last staging path, unless anything has it.

The kernel decides, not the node state: a mount that nobody remembers keeps the device attached, and a lost node state
does not.
"""

import os
from dataclasses import dataclass

from crust.blockdriver.engines.node_access import Attachment, NodeAccess
from crust.blockdriver.engines.pool_store import PoolHome
from crust.blockdriver.engines.protocol import ForeignImage, ImageMissing
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.node_state import NodeState, Staged
from crust.core import errors, volumes
from crust.host.block import devices
from crust.host.files import target_paths
from crust.host.mounts import device_mounts, mount_api, mountinfo
from crust.host.process import workers


@dataclass(frozen=True, slots=True)
class NodeUnpublish:
    """Unpublishes volumes. The caller makes one call per volume at a time."""

    pool: PoolHome
    node_state: NodeState
    access: NodeAccess
    target_roots: tuple[str, ...]

    async def unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        """Remove the publish and its target; not published is a success.

        Raises `OtherVolumeAtTarget`, `ForeignMountAtTarget`, `holders.DeviceInUse` (naming who uses it), and the
        errors of `paths`.
        """
        await workers.run(self._unpublish, volume_id, target)

    def _unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        entry = self.node_state.published(target)
        if entry is not None and entry.volume_id != volume_id:
            raise errors.Conflict.named(
                "OtherVolumeAtTarget",
                f"{volume_id} is not unpublished from {target.text}",
                why=f"{entry.volume_id} is published there",
                hint="unpublish with the id of that volume",
            )
        if entry is not None and entry.deferred:
            self._remove_unguarded(target)
        else:
            self._unmount(volume_id, target)
        if not self.node_state.unreadable(volume_id):
            self.node_state.forget_published(volume_id, target)

    def _remove_unguarded(self, target: volumes.TargetPath) -> None:
        """Remove the target of a deferred publish whose guard mount is gone: no other process knows the target
        then.
        """
        if mountinfo.at(target.text) is None:
            target_paths.remove(target, self.target_roots)

    def _unmount(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        mount = mountinfo.at(target.text)
        if mount is not None and mount_api.is_guard(mount):
            return  # the proxy's guard mount, of a deferred publish that the node state has lost
        if mount is not None:
            # Checked before the unmount: /home is a mount as well, and so may be the target of a link.
            os.close(target_paths.open_parent(target, self.target_roots))
            self._check_ours(volume_id, target, mount)
            mount_api.unmount(target.text)
        target_paths.remove(target, self.target_roots)

    def _check_ours(
        self, volume_id: volumes.VolumeId, target: volumes.TargetPath, mount: mountinfo.Mount
    ) -> None:
        """Refuse a foreign mount. Without an attached device that cannot be known, and the CO decides.

        The storage is not asked: a pod ends whatever has become of it.
        """
        attachment = (
            self.access.host_device(volume_id) if self.pool.ids.is_volume_id(volume_id) else None
        )
        device = attachment.device if attachment is not None else None
        if device is not None and not device_mounts.shows(mount, device):
            raise errors.NotReady.named(
                "ForeignMountAtTarget",
                f"{volume_id} is not unpublished from {target.text}",
                why=f"{mount.fs_type} from {mount.source} is mounted there",
                hint="find out what mounted it, and unmount it by hand",
            )


class StillPublished(errors.NotReady):
    """The volume to be unstaged is still published."""

    def __init__(self, volume_id: str, targets: tuple[str, ...]) -> None:
        super().__init__(
            f"{volume_id} cannot be unstaged",
            why=f"it is still published at {', '.join(targets)}",
            hint="unpublish it there first",
        )
        self.volume_id = volume_id
        self.targets = targets


@dataclass(frozen=True, slots=True)
class NodeUnstage:
    """Unstages volumes. The caller makes one call per volume at a time."""

    pool: PoolHome
    node_state: NodeState
    access: NodeAccess
    io_limits: IoLimits

    async def unstage(self, volume_id: volumes.VolumeId, path: volumes.TargetPath) -> None:
        """Detach the volume if `path` is the last one it is staged at; not staged, or unknown, is a success.

        Raises `StillPublished`, and `NotReady` with the holder while the device is in use.
        """
        await workers.run(self._unstage, volume_id, path)

    def _unstage(self, volume_id: volumes.VolumeId, path: volumes.TargetPath) -> None:
        if not self.pool.ids.is_volume_id(volume_id):
            return
        unreadable = self.node_state.unreadable(volume_id)
        staged = None if unreadable else self.node_state.staged(volume_id)
        others = () if staged is None else _others(staged, path.text)
        if staged is not None and others:
            self.node_state.note_staged(staged.model_copy(update={"paths": others}))
            return
        published = () if unreadable else self.node_state.live_publishes(volume_id)
        if published:
            raise StillPublished(volume_id, tuple(entry.target for entry in published))
        attachment = self._attached(volume_id)
        if attachment is None:
            self.access.detach(volume_id)  # what a failed stage has left of it
        else:
            if attachment.device is not None:
                _check_unmounted(volume_id, attachment)
                if staged is None or staged.kind == "block":
                    _check_unbound(volume_id, attachment)
            with self.io_limits.released(attachment):
                self.access.detach(volume_id)
        self.node_state.forget_staged(volume_id)

    def _attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """None too for an image that was removed or replaced behind our back: its pod must be able to end."""
        try:
            return self.access.host_device(volume_id)
        except (ImageMissing, ForeignImage):
            return None


def _check_unmounted(volume_id: volumes.VolumeId, attachment: Attachment) -> None:
    if devices.is_free(attachment.host_device.path, attachment.host_device.identity):
        return
    mounted = device_mounts.filesystem_mounts(attachment.host_device)
    if mounted:
        raise StillPublished(volume_id, tuple(mount.target for mount in mounted))


def _check_unbound(volume_id: volumes.VolumeId, attachment: Attachment) -> None:
    bound = device_mounts.node_mounts(attachment.host_device)
    if bound:
        raise StillPublished(volume_id, tuple(mount.target for mount in bound))


def _others(staged: Staged, path: str) -> tuple[str, ...]:
    """The other staging paths, without those that the CO has removed."""
    return tuple(each for each in staged.paths if each != path and os.path.isdir(each))

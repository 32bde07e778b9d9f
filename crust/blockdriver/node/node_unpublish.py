"""NodeUnpublishVolume: unmounts and removes the target, whatever the driver has recorded about it.

The kernel decides, not the node state: deleted volumes, lost node state and interrupted publishes are unpublished
too. A deferred publish has no mount of this driver; at its target is the proxy's guard mount, which the proxy
removes. The answer is sent when mountinfo does not show the mount any more.
"""

import os
from dataclasses import dataclass

from crust import errors, volumes
from crust.blockdriver.engines.protocol import NodeAccess
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.records.pool import Pool
from crust.host.files import target_paths
from crust.host.mounts import device_mounts, mount_api, mountinfo
from crust.host.process import workers


class OtherVolumeAtTarget(errors.Conflict):
    """Another volume than the named one is published at the target."""

    def __init__(self, target: str, wanted: str, present: str) -> None:
        super().__init__(
            f"{wanted} is not unpublished from {target}",
            why=f"{present} is published there",
            hint="unpublish with the id of that volume",
        )
        self.target = target
        self.present = present


class ForeignMountAtTarget(errors.NotReady):
    """Another mount than the volume's is at the target."""

    def __init__(self, target: str, volume_id: str, what: str) -> None:
        super().__init__(
            f"{volume_id} is not unpublished from {target}",
            why=f"{what} is mounted there",
            hint="find out what mounted it, and unmount it by hand",
        )
        self.target = target
        self.volume_id = volume_id


@dataclass(frozen=True, slots=True)
class NodeUnpublish:
    """Unpublishes volumes. The caller makes one call per volume at a time."""

    pool: Pool
    node_state: NodeState
    access: NodeAccess
    target_roots: tuple[str, ...]

    async def unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        """Remove the publish and its target; not published is a success.

        Raises `OtherVolumeAtTarget`, `ForeignMountAtTarget`, `holders.MountBusy` (naming who uses it), and the errors
        of `paths`.
        """
        await workers.run(self._unpublish, volume_id, target)

    def _unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        known = self.node_state.is_published_readable(target)
        entry = self.node_state.published(target) if known else None
        if entry is not None and entry.volume_id != volume_id:
            raise OtherVolumeAtTarget(target.text, volume_id, entry.volume_id)
        if entry is not None and entry.deferred:
            self._remove_unguarded(target)
        else:
            self._unmount(volume_id, target)
        self.node_state.forget_published(target)

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
            raise ForeignMountAtTarget(
                target.text, volume_id, f"{mount.fs_type} from {mount.source}"
            )

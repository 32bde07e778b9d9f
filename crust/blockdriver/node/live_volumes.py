"""Which volumes this node has now: the recorded state, compared with the kernel.

The node state records stages and publishes, and can be lost or stale; the engine and mountinfo are the truth. Every
caller that needs to know whether a volume is attached, staged or published asks here.
"""

from dataclasses import dataclass

from crust.blockdriver.engines.protocol import Attachment, NodeAccess
from crust.blockdriver.node.node_state import NodeState, Published
from crust.core import errors, volumes
from crust.host.mounts import device_mounts, mountinfo


class NotStaged(errors.NotReady):
    """The volume is not staged, or its device was detached since."""

    def __init__(self, volume_id: str, why: str = "") -> None:
        super().__init__(
            f"{volume_id} is not staged on this node", why=why, hint="call NodeStageVolume first"
        )
        self.volume_id = volume_id


@dataclass(frozen=True, slots=True)
class LiveVolumes:
    """Every method may block."""

    node_state: NodeState
    access: NodeAccess

    def attached_ids(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached, whichever process attached them."""
        return self.access.attached_here()

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached, if it is."""
        return self.access.attached(volume_id)

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give an attached volume's device its image's size."""
        return self.access.refresh(volume_id)

    def staging_paths(self, volume_id: volumes.VolumeId) -> tuple[str, ...]:
        """The staging paths of the volume; empty if it is not staged; the entry's own path if it cannot be read."""
        unreadable = self.node_state.unreadable_stage(volume_id)
        if unreadable:
            return (unreadable,)
        staged = self.node_state.staged(volume_id)
        return () if staged is None else staged.paths

    def forget_staged(self, volume_id: volumes.VolumeId) -> None:
        """Forget the stage of a volume that is not attached any more."""
        self.node_state.forget_staged(volume_id)

    def staged_attachment(self, volume_id: volumes.VolumeId) -> Attachment:
        """The device of a staged volume; raises `NotStaged`."""
        if self.node_state.staged(volume_id) is None:
            raise NotStaged(volume_id)
        attachment = self.access.attached(volume_id)
        if attachment is None:
            raise NotStaged(volume_id, "its device was detached by another program")
        return attachment

    def published(self, target: volumes.TargetPath) -> Published | None:
        """The publish at a target, of any volume, if it still exists."""
        entry = self.node_state.published(target)
        if entry is None:
            return None
        attachment = self.access.host_device(volumes.VolumeId(entry.volume_id))
        return entry if _is_live(entry, attachment.device if attachment else None) else None

    def live_publishes(self, volume_id: volumes.VolumeId) -> tuple[Published, ...]:
        """The publishes of the volume that exist."""
        entries = self.node_state.published_of(volume_id)
        if not entries:
            return ()
        attachment = self.access.host_device(volume_id)
        device = attachment.device if attachment else None
        return tuple(entry for entry in entries if _is_live(entry, device))

    def deferred_targets(self, volume_id: volumes.VolumeId) -> tuple[volumes.TargetPath, ...]:
        """The targets of the volume's deferred publishes."""
        entries = self.node_state.published_of(volume_id)
        return tuple(volumes.TargetPath(each.target) for each in entries if each.deferred)


def _is_live(entry: Published, device: volumes.BlockSource | None) -> bool:
    """Whether a publish exists: a deferred one by its entry, another one by its mount."""
    if entry.deferred:
        return True
    mount = mountinfo.at(entry.target)
    return mount is not None and device is not None and device_mounts.shows(mount, device)

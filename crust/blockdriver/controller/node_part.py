"""What the controller part asks of the node part that has a volume.

The two parts do not import each other: they share the records and the engine, and meet here. `app` gives the
controller part the node part of its own process. These calls must also make sense for a node on another machine.
"""

from typing import Protocol

from crust.blockdriver.engines.node_access import Attachment
from crust.core import volumes


class NodeVolumes(Protocol):
    """The volumes that the node has attached, staged and published now. Every method may block."""

    def attached_ids(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached, whichever process attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached, if it is."""
        ...

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give the device of an attached volume its image's size."""
        ...

    def staging_paths(self, volume_id: volumes.VolumeId) -> tuple[str, ...]:
        """The staging paths of the volume; empty if it is not staged."""
        ...

    def forget_staged(self, volume_id: volumes.VolumeId) -> None:
        """Forget the stage of a volume that is not attached any more."""
        ...

    def deferred_targets(self, volume_id: volumes.VolumeId) -> tuple[volumes.TargetPath, ...]:
        """The targets of the volume's deferred publishes."""
        ...


class LimitEnforcement(Protocol):
    """Enforces the I/O limits of a volume on the node."""

    def check(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Raise the reason why the node cannot enforce `limits`, as far as that can be known before."""
        ...

    def set_on_host(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Enforce `limits` on this host's mounts of the volume, if it has any."""
        ...

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Enforce `limits` in every guest that has the volume.

        Raises `PeerUnavailable` when the outcome in a guest is unknown. After any other error the guests that had
        changed have `before` again.
        """
        ...

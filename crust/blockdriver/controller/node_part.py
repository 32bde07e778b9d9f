"""What the controller part asks of the node part that has a volume, and what it tells it.

The two parts import nothing of each other: they share the records and the engine, and meet here. `app` gives the
controller the node part of its own process. So what stands here has to make sense for a node on another machine.
"""

from typing import Protocol

from crust import volumes
from crust.blockdriver.engines.protocol import Attachment


class NodeVolumes(Protocol):
    """Which volumes the node has attached, staged and published at this moment. Every method may block."""

    def attach_limit(self) -> int:
        """How many volumes the node can hold at once."""
        ...

    def attached_ids(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached, whoever attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached, if it is."""
        ...

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Let an attached volume take its image's size."""
        ...

    def staging_paths(self, volume_id: volumes.VolumeId) -> tuple[str, ...]:
        """Where the volume is staged; empty if it is not."""
        ...

    def forget_staged(self, volume_id: volumes.VolumeId) -> None:
        """Forget the stage of a volume whose device is gone."""
        ...

    def deferred_targets(self, volume_id: volumes.VolumeId) -> tuple[volumes.TargetPath, ...]:
        """Where the volume is published to guests."""
        ...


class LimitEnforcement(Protocol):
    """Holds the users of a volume on the node to its I/O limits."""

    def check(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Raise what keeps the node from enforcing `limits`, as far as that can be known before."""
        ...

    def set_on_host(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Enforce `limits` on this host's mounts of the volume, if it has any. Raises why it cannot."""
        ...

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, before: volumes.IoLimits
    ) -> None:
        """Enforce `limits` in every guest that has the volume.

        Raises `PeerUnavailable` when it is not known of a guest whether it obeys; for any other error, those that
        obeyed already have `before` again.
        """
        ...
